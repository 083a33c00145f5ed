"""What is selected, given the scores: causality, candidate blocks, the best entries.

Separate from `ref.py` because kernels that only score share it.
Read next: `ref.py`, which makes the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ....arrays import MASKED_SCORE, NOTHING, Array


class CandidateRule(NamedTuple):
    """How a layer takes part in the two-level selection (static).

    Attributes:
        role: "source" if it chooses the candidate blocks, "restricted" if its own selection stays
            inside them, "" otherwise.
        block_size: groups of a block.
        num_blocks: blocks kept.
    """

    role: str
    block_size: int
    num_blocks: int

    def blocks(self, groups: int) -> int:
        """Blocks that hold `groups` groups."""
        return -(-groups // self.block_size)


def mask_invisible(scores: Array, num_visible: Array) -> Array:
    """Mask groups that are not complete for a query.

    Args:
        scores: float32 [R, G].
        num_visible: int32 [R].

    Returns:
        float32 [R, G] with MASKED_SCORE where g >= num_visible.
    """
    groups = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :]
    return jnp.where(groups < num_visible[:, None], scores, MASKED_SCORE)


def candidate_blocks(scores: Array, num_visible: Array, rule: CandidateRule) -> Array:
    """Choose candidate blocks: the best by their best group, the newest visible one always.

    Args:
        scores: float32 [R, G], masked.
        num_visible: int32 [R].
        rule: sizes.

    Returns:
        bool [R, blocks].

    Source: spec/model.md section 8.
    """
    size = rule.block_size
    num_rows, groups = scores.shape
    blocks = rule.blocks(groups)
    padded = jnp.pad(scores, ((0, 0), (0, blocks * size - groups)), constant_values=MASKED_SCORE)
    best = jnp.max(padded.reshape(num_rows, blocks, size), axis=-1)
    block_ids = jnp.arange(blocks, dtype=jnp.int32)[None, :]
    newest = (num_visible[:, None] - 1) // size
    is_newest = (block_ids == newest) & (num_visible[:, None] > 0)
    best = jnp.where(is_newest, jnp.inf, best)
    values, ids = lax.top_k(best, min(rule.num_blocks, blocks))
    own = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((num_rows, blocks), bool).at[own, ids].set(values > MASKED_SCORE)


def restrict_to_candidates(scores: Array, is_candidate: Array, rule: CandidateRule) -> Array:
    """Mask the groups outside the candidate blocks: [R, G] scores, [R, blocks] bool."""
    is_inside = jnp.repeat(is_candidate, rule.block_size, axis=1)[:, : scores.shape[1]]
    return jnp.where(is_inside, scores, MASKED_SCORE)


def select(scores: Array, top_k: int) -> Array:
    """Select the best entries, ties to the lower index.

    Args:
        scores: float32 [R, G], masked.
        top_k: places.

    Returns:
        int32 [R, top_k], NOTHING in unused places; the order has no meaning.

    Source: spec/model.md section 7.
    """
    count = min(top_k, scores.shape[-1])
    values, ids = lax.top_k(scores, count)
    ids = jnp.where(values > MASKED_SCORE, ids.astype(jnp.int32), NOTHING)
    return jnp.pad(ids, ((0, 0), (0, top_k - count)), constant_values=NOTHING)
