"""The unit of computation: one token of one slot.

Separate because prefill chunks, decode tokens and draft blocks are all just rows; everything the
model knows about who a token's neighbours are comes from here.
Read next: `cache.py` (what rows read and write), `backbone.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arithmetic import cut_tiles
from ..arrays import Array
from ..kernels import RowGeometry


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


def text_rows(token_ids: Array, slots: Array, positions: Array, is_valid: Array, rows_per_block: int) -> Rows:
    """Make rows of text tokens."""
    is_image = jnp.zeros(token_ids.shape, bool)
    return Rows(token_ids, slots, positions, is_image, is_valid, rows_per_block=rows_per_block)


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
    return text_rows(
        token_ids.reshape(-1),
        jnp.repeat(jnp.arange(num_slots, dtype=jnp.int32), chunk),
        (starts[:, None] + offsets).reshape(-1),
        (offsets < num_tokens[:, None]).reshape(-1),
        rows_per_block=chunk,
    )


def row_tiles(rows: Rows, tile: int) -> Rows:
    """Cut rows into tiles, the last one padded with invalid rows.

    Args:
        rows: R rows.
        tile: rows of a tile.

    Returns:
        The same fields as [tiles, tile, ...], in blocks that divide a tile.
    """
    tiles = cut_tiles(rows, tile)
    return tiles.replace(rows_per_block=math.gcd(rows.rows_per_block, tile))


class StepRows(NamedTuple):
    """This device's rows of a tile, among those of all devices that share its sequences.

    Attributes:
        shared: all of them, in order; `own` itself if no device shares.
        own: this device's.
        earlier_mask: bool [shared rows], those before its own; None if no device shares.
    """

    shared: Rows
    own: Rows
    earlier_mask: Array | None


def own_rows(rows: Rows, count: int, index: Array | int) -> StepRows:
    """Take a device's share of a tile: equal runs of adjacent rows, in the order of the devices.

    All devices then work at nearly the same positions, so that causality loads them alike.

    Args:
        rows: of all devices that share their sequences.
        count: how many devices these are.
        index: this one's place among them.

    Returns:
        Its rows among them.
    """
    if count == 1:
        return StepRows(rows, rows, None)
    total = rows.token_ids.shape[0]
    share = total // count
    own = jax.tree.map(lambda values: lax.dynamic_slice_in_dim(values, index * share, share), rows)
    own = own.replace(rows_per_block=math.gcd(rows.rows_per_block, share))
    return StepRows(rows, own, jnp.arange(total, dtype=jnp.int32) < index * share)


def row_geometry(rows: Rows) -> RowGeometry:
    """Find where each row's slot begins in this step.

    Args:
        rows: the step's rows.

    Returns:
        What kernels know of the rows.
    """
    own = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    is_same_slot = rows.slots[1:] == rows.slots[:-1]
    is_next = rows.positions[1:] == rows.positions[:-1] + 1
    is_continued = jnp.pad(is_same_slot & is_next & rows.is_valid[:-1], (1, 0))
    slot_offsets = lax.cummax(jnp.where(is_continued, 0, own))
    return RowGeometry(
        slots=rows.slots,
        positions=rows.positions,
        is_valid=rows.is_valid,
        slot_offsets=slot_offsets,
        rows_per_block=rows.rows_per_block,
    )


def is_among_last(geometry: RowGeometry, count: int) -> Array:
    """Tell the valid rows that are among the last `count` rows of their slot in this step.

    A ring of `count` entries is written by exactly these, so that no entry is written twice.

    Returns:
        bool [R].
    """
    total = geometry.slots.shape[0]
    own = jnp.arange(total, dtype=jnp.int32)
    later = jnp.minimum(own + count, total - 1)
    is_followed = (own + count < total) & geometry.is_valid[later] & (geometry.slot_offsets[later] <= own)
    return geometry.is_valid & ~is_followed
