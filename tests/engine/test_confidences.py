"""Rounds that calibration learns from: fully verified, of every regime, and nothing that an end cut short.

Separate because an engine is run here for what it leaves out, not for its tokens.
Read next: `../spec_decode/test_calibrate.py`.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, Model, RequestError, SamplingParams
from deepinfer_jax.engine.confidences import collect_rounds, in_every_regime
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.presets import SMALLEST, SMALLEST_DRAFTED, random_weights

SIZE = SMALLEST_DRAFTED.draft.block_size
OPTIONS = EngineConfig(num_slots=8, max_context=512)
LIKELY = {7: 9.0, 30: 8.5, 55: 8.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALLEST_DRAFTED, random_weights(SMALLEST_DRAFTED, jax.random.key(4)), FLOAT32, None)


def test_rounds_of_all_regimes_are_whole(model: Model) -> None:
    base = SamplingParams(max_tokens=30, logit_bias=LIKELY, ignore_eos=True, logprobs=3)
    params = [one for _ in range(4) for one in in_every_regime(base)]
    prompts = [[3 + number, 9, 11] for number in range(len(params))]
    rounds = collect_rounds(model, prompts, params, OPTIONS)
    assert set(rounds.regimes.tolist()) == {0, 1, 2}
    assert (rounds.num_verified == SIZE).all() and rounds.logits.shape == (len(rounds.regimes), SIZE)
    assert 0 < rounds.num_accepted.mean() < SIZE and rounds.num_accepted.max() <= SIZE
    # What is left out: rounds near max_tokens, at most SIZE tokens of each answer.
    tokens = (1 + rounds.num_accepted).sum()
    assert len(params) * (30 - 1 - 2 * SIZE) <= tokens <= len(params) * 30


def test_a_stop_token_that_was_drafted_leaves_its_round_out(model: Model) -> None:
    """Whether the drafts behind it were right nobody knows."""
    params = SamplingParams(max_tokens=40, temperature=0.0, logit_bias={7: 50.0}, stop_token_ids=(7,))
    free = collect_rounds(
        model, [[5, 6]], [SamplingParams(max_tokens=40, temperature=0.0, logit_bias={7: 50.0})], OPTIONS
    )
    assert (free.num_accepted == SIZE).all()
    with pytest.raises(RequestError, match="got no round whose drafts were all verified"):
        collect_rounds(model, [[5, 6]], [params], OPTIONS)


def test_a_model_without_drafts_is_refused() -> None:
    plain = Model(SMALLEST, random_weights(SMALLEST, jax.random.key(4)), FLOAT32, None)
    with pytest.raises(RequestError, match="drafts: got 'fixed'"):
        collect_rounds(plain, [[5, 6]], [SamplingParams()], OPTIONS)


def test_regimes_keep_the_rest_of_the_parameters() -> None:
    base = SamplingParams(max_tokens=9, top_k=5, presence_penalty=0.5, seed=3)
    assert [one.presence_penalty for one in in_every_regime(base)] == [0.5] * 3
    assert [(one.temperature, one.top_k, one.top_p) for one in in_every_regime(base)] == [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (1.0, 0, 0.9),
    ]
    assert np.unique([one.max_tokens for one in in_every_regime(base)]).tolist() == [9]
