"""Selection against brute force: visibility, candidates, top-k, ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.kernels.pallas.index_top_k import selection
from deepinfer_jax.kernels.pallas.index_top_k.selection import CandidateRule
from deepinfer_jax.testing import references

GROUPS, TOPK = 15, 4
RULE = CandidateRule("source", block_size=2, num_blocks=3)

mask_invisible = jax.jit(selection.mask_invisible)
select = jax.jit(selection.select, static_argnames="top_k")
candidate_blocks = jax.jit(selection.candidate_blocks, static_argnames="rule")


def chosen(ids) -> list[set[int]]:
    return [set(row.tolist()) - {NOTHING} for row in np.asarray(ids)]


def masked(scores: list[int], num_visible: int) -> tuple[jax.Array, jax.Array]:
    visible = jnp.array([num_visible], jnp.int32)
    return mask_invisible(jnp.array([scores], jnp.float32), visible), visible


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bc03_query_can_select_complete_groups_only(ratio: int) -> None:
    positions = np.arange(16, dtype=np.int32)
    scores = jnp.asarray(np.random.default_rng(16).normal(size=(16, 16)).astype(np.float32))
    visible = mask_invisible(scores, jnp.asarray((positions + 1) // ratio))
    for position, found in zip(positions, chosen(select(visible, top_k=16)), strict=True):
        assert found == {group for group in range(16) if group * ratio + ratio - 1 <= position}


# A small grid, so that ties are common.
grid_scores = st.lists(st.integers(-3, 3), min_size=GROUPS, max_size=GROUPS)


@given(grid_scores, st.integers(0, GROUPS))
def test_selection_equals_brute_force(scores: list[int], num_visible: int) -> None:
    row, _ = masked(scores, num_visible)
    expected = references.best(np.asarray(row)[0], TOPK)
    assert chosen(select(row, top_k=TOPK)) == [expected]
    assert len(expected) == min(TOPK, num_visible)


def test_selection_of_fewer_groups_than_places_is_padded() -> None:
    assert np.asarray(select(jnp.array([[1.0, 2.0]]), top_k=4)).tolist() == [[1, 0, NOTHING, NOTHING]]


@given(grid_scores, st.integers(0, GROUPS))
def test_candidates_equal_brute_force(scores: list[int], num_visible: int) -> None:
    row, visible = masked(scores, num_visible)
    found = np.flatnonzero(np.asarray(candidate_blocks(row, visible, rule=RULE))[0])
    expected = references.candidate_blocks(np.asarray(row)[0], num_visible, RULE.block_size, RULE.num_blocks)
    assert set(found.tolist()) == expected


def test_newest_visible_block_is_always_a_candidate() -> None:
    row, visible = masked([-group for group in range(GROUPS)], 9)
    found = candidate_blocks(row, visible, rule=RULE)
    assert np.flatnonzero(np.asarray(found)[0]).tolist() == [0, 1, 4]


@given(grid_scores, st.integers(1, GROUPS))
def test_candidates_contain_the_best_group(scores: list[int], num_visible: int) -> None:
    row, visible = masked(scores, num_visible)
    (top,) = references.best(np.asarray(row)[0], 1)
    assert np.asarray(candidate_blocks(row, visible, rule=RULE))[0, top // RULE.block_size]


def test_restriction_masks_whole_blocks() -> None:
    scores = jnp.arange(7, dtype=jnp.float32)[None]
    is_candidate = jnp.array([[True, False, False, True]])
    found = np.asarray(selection.restrict_to_candidates(scores, is_candidate, RULE))
    assert found.tolist() == [[0, 1, -np.inf, -np.inf, -np.inf, -np.inf, 6]]


def test_no_block_is_a_candidate_before_the_first_group() -> None:
    row, visible = masked([1] * GROUPS, 0)
    assert not np.asarray(candidate_blocks(row, visible, rule=RULE)).any()
