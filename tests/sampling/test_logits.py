"""Temperature, top-k, top-p and min-p alone: which tokens stay, and who wins among equals.

Separate because the filters are tested on scores alone, without a request.
Read next: `test_sample.py`, where they meet the other controls.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import MASKED_SCORE
from deepinfer_jax.sampling.logits import (
    is_greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    scale_by_temperature,
)

VOCAB = 8
ROWS = 4
EVERYTHING = np.ones((ROWS, VOCAB), bool)

best_k = jax.jit(keep_top_k)
best_mass = jax.jit(keep_top_p)
above = jax.jit(keep_min_p)
scale = jax.jit(scale_by_temperature)

# Whole quarters: many ties, and no two different probabilities that rounding could exchange.
score_rows = st.lists(
    st.lists(st.integers(-40, 0).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    min_size=ROWS,
    max_size=ROWS,
)


def rows_of(scores: list[list[float]]) -> np.ndarray:
    """Float32 [ROWS, VOCAB] with the best of each row at 0."""
    array = np.array(scores, np.float32)
    return array - array.max(axis=1, keepdims=True)


def full(value: float, dtype: type = np.float32) -> np.ndarray:
    return np.full(ROWS, value, dtype)


def ranking(scores: np.ndarray) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


@given(scores=score_rows, top_k=st.integers(0, VOCAB + 2))
def test_top_k_keeps_exactly_k_and_the_lower_id_of_equals(scores: list[list[float]], top_k: int) -> None:
    array = rows_of(scores)
    found = np.asarray(best_k(array, full(top_k, np.int32)))
    for row in range(ROWS):
        assert set(np.flatnonzero(found[row])) == set(ranking(array[row])[: top_k or VOCAB])


@given(scores=score_rows, top_p=st.floats(0.01, 0.99), top_k=st.integers(0, VOCAB))
def test_top_p_keeps_the_smallest_mass_of_what_top_k_kept(
    scores: list[list[float]], top_p: float, top_k: int
) -> None:
    array = rows_of(scores)
    is_kept = np.asarray(best_k(array, full(top_k, np.int32)))
    found = np.asarray(best_mass(array, is_kept, full(top_p)))
    for row in range(ROWS):
        order = ranking(array[row])[: top_k or VOCAB]
        weights = np.exp(array[row].astype(np.float64))[order]
        before = (np.cumsum(weights) - weights) / weights.sum()
        if np.abs(before - np.float32(top_p)).min() > 1e-6:
            expected = {token for token, mass in zip(order, before, strict=True) if mass < top_p}
            assert set(np.flatnonzero(found[row])) == expected


@pytest.mark.parametrize("eighths", range(1, VOCAB + 1))
def test_exact_halves_of_equals_end_at_the_lower_ids(eighths: int) -> None:
    equal = np.zeros((ROWS, VOCAB), np.float32)
    exact, above_it = np.float32(eighths / 8), np.nextafter(np.float32(eighths / 8), np.float32(2))
    for top_p, count in ((exact, eighths), (min(above_it, np.float32(1)), min(eighths + 1, VOCAB))):
        found = np.asarray(best_mass(equal, EVERYTHING, full(top_p)))
        np.testing.assert_array_equal(found, np.arange(VOCAB)[None] < np.full((ROWS, 1), count))


def test_top_p_renormalises_after_top_k() -> None:
    equal = np.zeros((ROWS, VOCAB), np.float32)
    four = np.asarray(best_k(equal, full(4, np.int32)))
    assert np.asarray(best_mass(equal, four, full(0.5))).sum(axis=1).tolist() == [2] * ROWS
    # A token that top_k dropped is not kept again, equal as it is.
    odd = np.tile(np.arange(VOCAB) % 2 == 1, (ROWS, 1))
    assert np.flatnonzero(np.asarray(best_mass(equal, odd, full(0.5)))[0]).tolist() == [1, 3]
    assert np.flatnonzero(np.asarray(best_mass(equal, odd, full(1.0)))[0]).tolist() == [1, 3, 5, 7]


@given(scores=score_rows, top_p=st.sampled_from([1e-45, 1e-30, 1e-3]))
def test_top_p_always_keeps_the_best_token(scores: list[list[float]], top_p: float) -> None:
    array = rows_of(scores)
    found = np.asarray(best_mass(array, EVERYTHING, full(top_p)))
    np.testing.assert_array_equal(found.argmax(axis=1), array.argmax(axis=1))
    assert (found.sum(axis=1) == 1).all()


def test_top_p_of_one_keeps_every_token_however_unlikely() -> None:
    scores = np.tile(np.array([0, -60, -80, -90, -100, -200, -1e30, -2], np.float32), (ROWS, 1))
    assert np.asarray(best_mass(scores, EVERYTHING, full(1.0))).all()
    # What has no weight in float32 is left out by any other mass.
    found = np.asarray(best_mass(scores, EVERYTHING, full(np.nextafter(np.float32(1), np.float32(0)))))
    assert not found[:, 4:7].any()


def test_min_p_keeps_a_part_of_the_best() -> None:
    scores = np.log(np.array([[1, 0.5, 0.3, 0.05, 0.5, 1e-30, 1, 0.29]] * ROWS, np.float32))
    found = np.asarray(above(scores, np.array([0, 1, 0.4, 0.2], np.float32)))
    kept = [np.flatnonzero(row).tolist() for row in found]
    assert kept == [[*range(VOCAB)], [0, 6], [0, 1, 4, 6], [0, 1, 2, 4, 6, 7]]


def test_masked_tokens_do_no_harm() -> None:
    scores = np.full((ROWS, VOCAB), MASKED_SCORE, np.float32)
    scores[:, 5] = 0
    for found in (
        best_k(scores, full(1, np.int32)),
        best_mass(scores, EVERYTHING, full(0.9)),
        above(scores, full(1e-30)),
    ):
        assert np.flatnonzero(np.asarray(found)[0]).tolist() == [5]
    assert np.asarray(best_k(scores, full(3, np.int32))).sum(axis=1).tolist() == [3] * ROWS


def test_temperature_divides_the_distance_from_the_best() -> None:
    logits = np.tile(np.array([3, 1, 2, -5, 3, 0, 0.5, MASKED_SCORE], np.float32), (ROWS, 1))
    found = np.asarray(scale(logits, np.array([0.5, 2, 0, 1e-6], np.float32)))
    distance = logits[0] - 3
    for row, factor in enumerate([2, 0.5, 1, 1]):
        np.testing.assert_array_equal(found[row], distance * np.float32(factor))
    temperatures = jnp.array([0, 9.9e-6, 1e-5, 1], jnp.float32)
    assert np.asarray(is_greedy(temperatures)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature", [1e-5, 1e30])
def test_no_temperature_makes_a_nan_or_moves_the_best(temperature: float) -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([[largest, -largest, 0, MASKED_SCORE, 1, 2, 3, 4]] * ROWS, np.float32)
    logits[1] = MASKED_SCORE
    found = np.asarray(scale(logits, full(temperature)))
    assert not np.isnan(found).any()
    assert found[0, 0] == 0
    assert (found[:, 3] == MASKED_SCORE).all()
