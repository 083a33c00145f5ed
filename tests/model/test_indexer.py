"""Selection against brute force: visibility, candidates, top-k, ties."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.model import compressor, indexer
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.tolerances import assert_close

BLOCK, TOPK, KEPT = TINY.candidate_block_size, TINY.index_topk, TINY.candidate_topk_blocks


def best(scores: np.ndarray, count: int) -> set[int]:
    """Indices of the `count` highest finite scores, ties to the lower index."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return {index for index in order[:count] if scores[index] > -np.inf}


def chosen(ids) -> list[set[int]]:
    return [set(row.tolist()) - {NOTHING} for row in np.asarray(ids)]


def masked(scores: np.ndarray, num_visible: np.ndarray) -> jax.Array:
    return indexer.mask_invisible(jnp.asarray(scores), jnp.asarray(num_visible, jnp.int32))


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bc03_number_of_visible_groups(ratio: int) -> None:
    found = compressor.num_visible_groups(jnp.arange(16, dtype=jnp.int32), ratio)
    assert np.asarray(found).tolist() == [(q + 1) // ratio for q in range(16)]


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bc03_query_can_select_complete_groups_only(ratio: int) -> None:
    positions = np.arange(16)
    scores = np.random.default_rng(16).normal(size=(16, 16)).astype(np.float32)
    visible = masked(scores, compressor.num_visible_groups(jnp.asarray(positions, jnp.int32), ratio))
    everything = replace(TINY, index_topk=16)
    for position, selection in zip(positions, chosen(indexer.select(visible, everything)), strict=True):
        assert selection == {group for group in range(16) if group * ratio + ratio - 1 <= position}


def test_scores_are_weighted_relus() -> None:
    random = np.random.default_rng(17)
    queries = random.normal(size=(2, 3, 4, 8)).astype(np.float32)
    heads = random.normal(size=(2, 3, 4)).astype(np.float32)
    keys = random.normal(size=(2, 5, 8)).astype(np.float32)
    products = np.maximum(np.einsum("sqih,sgh->sqig", queries, keys, dtype=np.float64), 0)
    expected = np.einsum("sqi,sqig->sqg", heads, products)
    found = indexer.index_scores(jnp.asarray(queries), jnp.asarray(heads), jnp.asarray(keys))
    assert (expected < 0).any()
    assert_close(found, expected, "equivalence_float32")


# A small grid, so that ties are common.
grid_scores = st.lists(st.integers(-3, 3), min_size=15, max_size=15)


@given(grid_scores, st.integers(0, 15))
def test_selection_equals_brute_force(scores: list[int], num_visible: int) -> None:
    row = masked(np.array([scores], np.float32), np.array([num_visible]))
    expected = best(np.asarray(row)[0], TOPK)
    assert chosen(indexer.select(row, TINY)) == [expected]
    assert len(expected) == min(TOPK, num_visible)


def test_selection_of_fewer_groups_than_places_is_padded() -> None:
    found = np.asarray(indexer.select(jnp.array([[1.0, 2.0]]), TINY))
    assert found.tolist() == [[1, 0, NOTHING, NOTHING]]


def brute_force_candidates(scores: np.ndarray, num_visible: int) -> set[int]:
    blocks = -(-len(scores) // BLOCK)
    highest = np.array([scores[block * BLOCK : (block + 1) * BLOCK].max() for block in range(blocks)])
    if num_visible:
        highest[(num_visible - 1) // BLOCK] = np.inf
    return best(highest, KEPT)


@given(grid_scores, st.integers(0, 15))
def test_candidates_equal_brute_force(scores: list[int], num_visible: int) -> None:
    row = masked(np.array([scores], np.float32), np.array([num_visible]))
    found = indexer.candidate_blocks(row, jnp.array([num_visible], jnp.int32), TINY)
    expected = brute_force_candidates(np.asarray(row)[0], num_visible)
    assert set(np.flatnonzero(np.asarray(found)[0]).tolist()) == expected


def test_newest_visible_block_is_always_a_candidate() -> None:
    scores = -np.arange(12, dtype=np.float32)[None]
    found = indexer.candidate_blocks(masked(scores, np.array([9])), jnp.array([9], jnp.int32), TINY)
    assert np.flatnonzero(np.asarray(found)[0]).tolist() == [0, 1, 4]


@given(grid_scores, st.integers(1, 15))
def test_candidates_contain_the_best_group(scores: list[int], num_visible: int) -> None:
    row = masked(np.array([scores], np.float32), np.array([num_visible]))
    found = indexer.candidate_blocks(row, jnp.array([num_visible], jnp.int32), TINY)
    (top,) = best(np.asarray(row)[0], 1)
    assert np.asarray(found)[0, top // BLOCK]


def test_restriction_masks_whole_blocks() -> None:
    scores = np.arange(7, dtype=np.float32)[None]
    is_candidate = jnp.array([[True, False, False, True]])
    found = np.asarray(indexer.restrict_to_candidates(jnp.asarray(scores), is_candidate, TINY))
    assert found.tolist() == [[0, 1, -np.inf, -np.inf, -np.inf, -np.inf, 6]]


def test_no_block_is_a_candidate_before_the_first_group() -> None:
    scores = masked(np.ones((1, 8), np.float32), np.array([0]))
    assert not np.asarray(indexer.candidate_blocks(scores, jnp.array([0], jnp.int32), TINY)).any()
