"""Penalties, biases and bans on logits, against their formulas one number at a time.

Separate because they need a slot's history and no probabilities.
Read next: `test_sample.py`, where they meet the other controls.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import MASKED_SCORE
from deepinfer_jax.sampling.penalties import add_bias, mask_stops, penalize
from deepinfer_jax.sampling_params import MAX_BIASED_TOKENS, SamplingParams
from deepinfer_jax.testing.samplers import Row, sampler_of
from deepinfer_jax.testing.tolerances import assert_close

VOCAB = 8
EOS = 1
LARGEST = float(np.finfo(np.float32).max)

apply = jax.jit(penalize)

#             prompt  both   output twice       unseen
LOGITS = np.array([2.0, -2.0, 1.0, -1.0, 0.0, 3.0, -3.0, 0.5], np.float32)
PROMPT, GENERATED = (0, 1, 2, 3, 4), (2, 3, 3, 5, 6, 6)


def penalized(logits: np.ndarray, **controls: Any) -> np.ndarray:
    sampler = sampler_of([Row(SamplingParams(**controls), PROMPT, GENERATED)], VOCAB, EOS)
    return np.asarray(apply(jnp.asarray(logits[None]), sampler))[0]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    found = penalized(LOGITS, repetition_penalty=2.0)
    assert found.tolist() == [1.0, -4.0, 0.5, -2.0, 0.0, 1.5, -6.0, 0.5]
    rewarded = penalized(LOGITS, repetition_penalty=0.5)
    assert rewarded.tolist() == [4.0, -1.0, 2.0, -0.5, 0.0, 6.0, -1.5, 0.5]


def test_presence_and_frequency_look_at_the_output_only() -> None:
    found = penalized(LOGITS, presence_penalty=0.5)
    assert (LOGITS - found).tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0.5, 0]
    found = penalized(LOGITS, frequency_penalty=0.5)
    assert (LOGITS - found).tolist() == [0, 0, 0.5, 1.0, 0, 0.5, 1.0, 0]
    found = penalized(LOGITS, frequency_penalty=-0.25, presence_penalty=1.0)
    assert (LOGITS - found).tolist() == [0, 0, 0.75, 0.5, 0, 0.75, 0.5, 0]


def test_repetition_comes_first() -> None:
    found = penalized(LOGITS, repetition_penalty=1.3, presence_penalty=2.0, frequency_penalty=0.7)
    counts = np.bincount(GENERATED, minlength=VOCAB)
    seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT)
    expected = np.where(seen, np.where(LOGITS > 0, LOGITS / 1.3, LOGITS * 1.3), LOGITS)
    assert_close(found, expected - 0.7 * counts - 2.0 * (counts > 0), "formula_float32")


def test_without_penalties_every_bit_stays() -> None:
    logits = np.array([0.1, -0.0, 0.0, 1.2e-38, -3e38, 3e38, MASKED_SCORE, 1 / 3], np.float32)
    np.testing.assert_array_equal(penalized(logits).view(np.uint32), logits.view(np.uint32))


@pytest.mark.parametrize("repetition", [0.01, 100.0])
@pytest.mark.parametrize("other", [-100.0, 100.0])
def test_results_stay_finite_and_masked_tokens_stay_masked(repetition: float, other: float) -> None:
    logits = np.array([LARGEST, -LARGEST, LARGEST, -LARGEST, 0, MASKED_SCORE, MASKED_SCORE, 1], np.float32)
    penalties = {"repetition_penalty": repetition, "presence_penalty": other, "frequency_penalty": other}
    found = penalized(logits, **penalties)
    assert np.isfinite(found).tolist() == np.isfinite(logits).tolist()
    assert not np.isnan(found).any()


def test_biases_touch_their_tokens_only() -> None:
    ids = np.full((2, MAX_BIASED_TOKENS), -1, np.int32)
    values = np.zeros((2, MAX_BIASED_TOKENS), np.float32)
    ids[0, :3], values[0, :3] = [3, 0, 6], [1.5, -2.0, MASKED_SCORE]
    logits = np.stack([LOGITS, LOGITS])
    found = np.asarray(add_bias(jnp.asarray(logits), jnp.asarray(ids), jnp.asarray(values)))
    assert (found[0] - LOGITS).tolist() == [-2.0, 0, 0, 1.5, 0, 0, MASKED_SCORE, 0]
    # Unused places must not count from the end.
    np.testing.assert_array_equal(found[1], LOGITS)


def test_stop_tokens_are_masked_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(4, VOCAB - 1))
    rows = [Row(params, (), output) for output in ((), (3,), (3, 3))]
    rows.append(Row(SamplingParams(min_tokens=2, ignore_eos=True)))
    found = mask_stops(jnp.zeros((4, VOCAB), jnp.float32), sampler_of(rows, VOCAB, EOS))
    masked = [np.flatnonzero(np.isinf(row)).tolist() for row in np.asarray(found)]
    assert masked == [[EOS, 4, 7], [EOS, 4, 7], [], []]
