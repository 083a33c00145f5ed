"""Drafts that share the target's noise: how often they agree, in closed form and with the real noise.

Separate because the noise belongs to sampling; whether coupled tokens are the target's is tested in
`test_verification.py`.
Read next: `test_verification.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN, gumbel
from deepinfer_jax.spec_decode.verify import accept_coupled
from deepinfer_jax.testing.tolerances import assert_close

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())

POSITIONS, VOCAB = 2**15, 4
DEVIATIONS = 4
"""Binomial standard deviations within which a frequency must lie: one in 16,000 lies outside."""

LIMITS = {1: 10.8, 2: 13.8, 3: 16.3}
"""Chi-square at one in a thousand, by degrees of freedom."""


@jax.jit
def coupled_tokens(
    target_scores: jax.Array, draft_scores: jax.Array, seeds: jax.Array, drafting_shift: jax.Array
) -> tuple[jax.Array, ...]:
    """Draft and target tokens at many positions, and which drafts are accepted."""
    positions = jnp.arange(POSITIONS, dtype=jnp.int32)

    def best(scores: jax.Array, shift: jax.Array) -> jax.Array:
        noise = gumbel(seeds, positions + shift, SAMPLE_TOKEN, VOCAB)
        return jnp.argmax(scores[None, :] + noise, axis=1).astype(jnp.int32)

    target, draft = best(target_scores, jnp.int32(0)), best(draft_scores, drafting_shift)
    both = jnp.stack([target, jnp.zeros_like(target)], axis=1)
    lengths = jnp.ones(POSITIONS, jnp.int32)
    return target, draft, accept_coupled(draft[:, None], both, lengths)


def scores_of(law: list[float]) -> NDArray[np.float32]:
    padded = np.zeros(VOCAB)
    padded[: len(law)] = law
    with np.errstate(divide="ignore"):
        return np.log(padded).astype(np.float32)


def match_probability(p: list[float], q: list[float]) -> float:
    """Chance that both laws choose the same token with the same noise."""
    total = 0.0
    for mine, drafted in zip(p, q, strict=True):
        if mine > 0 and drafted > 0:
            total += 1 / sum(max(a / mine, b / drafted) for a, b in zip(p, q, strict=True))
    return total


def seed_words(seed: int) -> NDArray[np.uint32]:
    return np.tile(np.array([0, seed], np.uint32), (POSITIONS, 1))


def chi_square(tokens: Any, law: list[float]) -> float:
    expected = POSITIONS * np.array(law)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    possible = np.flatnonzero(expected)
    assert counts[possible].sum() == POSITIONS
    return float((np.square(counts[possible] - expected[possible]) / expected[possible]).sum())


each_case = pytest.mark.parametrize("case", CASES["gumbel_coupling_cases"], ids=lambda case: str(case["p"]))


@each_case
def test_closed_form_is_the_case_s_and_lies_within_its_bounds(case: dict[str, Any]) -> None:
    p, q, expect = case["p"], case["q"], case["expect"]
    distance = float(np.abs(np.subtract(p, q)).sum() / 2)
    assert_close(match_probability(p, q), expect["match_probability"], "formula_float32")
    assert_close(1 - distance, expect["rejection_sampling_acceptance"], "formula_float32")
    assert_close((1 - distance) / (1 + distance), expect["lower_bound"], "formula_float32")


@pytest.mark.parametrize("seed", [0, 20261130])
@each_case
def test_drafts_with_the_target_s_noise_agree_as_often_as_the_closed_form(
    case: dict[str, Any], seed: int
) -> None:
    p, q, expected = case["p"], case["q"], case["expect"]["match_probability"]
    scores = scores_of(p), scores_of(q)
    target, draft, accepted = coupled_tokens(*scores, seed_words(seed), np.int32(0))
    deviation = math.sqrt(expected * (1 - expected) / POSITIONS)
    assert abs(float(np.mean(np.asarray(accepted))) - expected) < DEVIATIONS * deviation
    for tokens, law in ((target, p), (draft, q)):
        degrees = int(np.count_nonzero(law)) - 1
        assert chi_square(tokens, law) <= LIMITS.get(degrees, 0.0)
    # The same laws with noise of another position agree as independent draws do, which is less.
    if min(p) > 0:
        *_, apart = coupled_tokens(*scores, seed_words(seed), np.int32(POSITIONS))
        independent = float(np.dot(p, q))
        deviation = math.sqrt(independent * (1 - independent) / POSITIONS)
        assert abs(float(np.mean(np.asarray(apart))) - independent) < DEVIATIONS * deviation
        assert independent < expected - 0.05


weights = st.lists(st.integers(0, 20), min_size=VOCAB, max_size=VOCAB).filter(any)


@given(p=weights, q=weights)
def test_agreement_lies_between_the_bounds_of_the_distance(p: list[int], q: list[int]) -> None:
    mine, drafted = (np.array(law) / sum(law) for law in (p, q))
    distance = np.abs(mine - drafted).sum() / 2
    found = match_probability(mine.tolist(), drafted.tolist())
    assert (1 - distance) / (1 + distance) - 1e-9 <= found <= 1 - distance + 1e-9
