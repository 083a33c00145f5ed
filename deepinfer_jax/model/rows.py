"""The unit of computation: one token of one slot.

Separate because prefill chunks, decode tokens and draft blocks are all just rows; everything the
model knows about who a token's neighbours are comes from here.
Read next: `cache.py` (what rows read and write), `backbone.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct

from ..arrays import Array


class Rows(struct.PyTreeNode):
    """Tokens of a step, flattened over slots and padded.

    The valid rows of a slot are adjacent, in order, with consecutive positions that continue what
    the cache holds; rows come in blocks of `rows_per_block` that belong to one slot each, and a
    slot's last block may end in invalid rows.

    Attributes:
        token_ids: int32 [R].
        slots: int32 [R], cache slot of the row.
        positions: int32 [R], absolute position in the sequence, from 0.
        is_image: bool [R], role: image tokens route with their own bias and break n-grams.
        is_valid: bool [R], False for padding: such a row changes nothing.
        rows_per_block: adjacent rows sure to share a slot (static); 1 fits any step.
    """

    token_ids: Array
    slots: Array
    positions: Array
    is_image: Array
    is_valid: Array
    rows_per_block: int = struct.field(pytree_node=False, default=1)


def chunk_rows(token_ids: Array, starts: Array, num_tokens: Array) -> Rows:
    """Flatten one text chunk per slot, slots 0..B-1, into rows in blocks of a chunk.

    Args:
        token_ids: int32 [B, Q].
        starts: int32 [B], position of each chunk's first token.
        num_tokens: int32 [B], valid tokens of each chunk; the rest is padding.

    Returns:
        Rows of B * Q tokens.
    """
    num_slots, chunk = token_ids.shape
    offsets = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    return Rows(
        token_ids=token_ids.reshape(-1),
        slots=jnp.repeat(jnp.arange(num_slots, dtype=jnp.int32), chunk),
        positions=(starts[:, None] + offsets).reshape(-1),
        is_image=jnp.zeros(num_slots * chunk, bool),
        is_valid=(offsets < num_tokens[:, None]).reshape(-1),
        rows_per_block=chunk,
    )


class Lookback(NamedTuple):
    """Earlier rows of the same slot in the same step.

    Attributes:
        rows: int32 [R, count], row index k rows back (k = 0 is the row itself), clamped to 0.
        is_in_step: bool [R, count], whether that row is the token k positions back.
    """

    rows: Array
    is_in_step: Array


def look_back(rows: Rows, count: int) -> Lookback:
    """Find for each row the rows that hold its `count` latest positions, itself included.

    Args:
        rows: the step's rows.
        count: positions to look at.

    Returns:
        The row indices and whether they are of this step; the others are in the cache.
    """
    distance = jnp.arange(count, dtype=jnp.int32)[None, :]
    own = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.maximum(own - distance, 0)
    is_same = rows.slots[index] == rows.slots[:, None]
    is_there = rows.positions[index] == rows.positions[:, None] - distance
    is_valid = rows.is_valid[index] & rows.is_valid[:, None]
    return Lookback(index, is_same & is_there & is_valid & (own >= distance))


def is_among_last(rows: Rows, count: int) -> Array:
    """Tell the valid rows that are among the last `count` rows of their slot in this step.

    A ring of `count` entries is written by exactly these, so that no entry is written twice.

    Returns:
        bool [R].
    """
    total = rows.slots.shape[0]
    own = jnp.arange(total, dtype=jnp.int32)
    later = jnp.minimum(own + count, total - 1)
    is_followed = (
        (own + count < total)
        & rows.is_valid[later]
        & (rows.slots[later] == rows.slots)
        & (rows.positions[later] == rows.positions + count)
    )
    return rows.is_valid & ~is_followed
