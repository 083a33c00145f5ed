"""The meaning of sparse attention in plain JAX: gather packed rows, unpack, attend.

Separate because it is what every kernel is compared with, and what runs where none exists.
Read next: `api.py`, `../../row_format.py` (how rows are packed).
"""

from __future__ import annotations

import jax.numpy as jnp

from ....arithmetic import contract, round_to
from ....arrays import MASKED_SCORE, Array
from ...geometry import RowGeometry
from ...row_format import CacheFormat
from ..quantize_rows.ref import unpack_rows


def sparse_attention(
    q: Array,
    window_rings: Array,
    layer: Array,
    window_rows: Array,
    entry_pages: Array | None,
    source: Array,
    page_table: Array,
    selection: Array | None,
    attn_sink: Array,
    geometry: RowGeometry,
    window_starts: Array,
    *,
    window: int,
    cache_format: CacheFormat,
) -> Array:
    """Attend as `api.sparse_attention` says; same arguments, already checked."""
    packed, is_visible = window_keys(window_rings, layer, window_rows, geometry, window_starts, window)
    keys = unpack_rows(packed, cache_format.window, q.dtype)
    if entry_pages is not None and selection is not None:
        packed, is_there = selected_entries(entry_pages, source, page_table, selection, geometry)
        keys = jnp.concatenate([keys, unpack_rows(packed, cache_format.entry, q.dtype)], axis=1)
        is_visible = jnp.concatenate([is_visible, is_there], axis=1)
    return attend(q, keys, is_visible, attn_sink)


def window_keys(
    window_rings: Array,
    layer: Array,
    window_rows: Array,
    geometry: RowGeometry,
    window_starts: Array,
    window: int,
) -> tuple[Array, Array]:
    """Gather each row's `window` latest packed rows: of this step where they are in it, else of the ring.

    Args:
        window_rings: [L, B, ring, width].
        layer: int32 scalar.
        window_rows: [R, width], this step's.
        geometry: who the rows are.
        window_starts: int32 [R].
        window: look-backs, the row itself included.

    Returns:
        [R, window, width] packed rows, k positions back at k; bool [R, window] whether each is visible.
    """
    slots, ring = window_rings.shape[1:3]
    lookback = jnp.arange(window, dtype=jnp.int32)[None, :]
    own = jnp.arange(window_rows.shape[0], dtype=jnp.int32)[:, None]
    positions = geometry.positions[:, None] - lookback
    slot = jnp.clip(geometry.slots, 0, slots - 1)[:, None]
    from_ring = window_rings[layer, slot, positions % ring]
    from_step = window_rows[jnp.maximum(own - lookback, 0)]
    is_in_step = own - lookback >= geometry.slot_offsets[:, None]
    is_visible = (positions >= jnp.maximum(window_starts, 0)[:, None]) & geometry.is_valid[:, None]
    return jnp.where(is_in_step[:, :, None], from_step, from_ring), is_visible


def selected_entries(
    entry_pages: Array, source: Array, page_table: Array, selection: Array, geometry: RowGeometry
) -> tuple[Array, Array]:
    """Gather selected packed entries of each row's slot through its page table.

    Args:
        entry_pages: [S, P, entries, width].
        source: int32 scalar.
        page_table: int32 [B, pages_per_slot]; a page outside 0..P-1 holds nothing.
        selection: int32 [R, K]; a group outside the slot's pages selects nothing.
        geometry: who the rows are.

    Returns:
        [R, K, width] packed entries, bool [R, K] whether each is there.
    """
    num_pages, entries = entry_pages.shape[1:3]
    slots, pages_per_slot = page_table.shape
    is_group = (selection >= 0) & (selection < pages_per_slot * entries)
    group = jnp.where(is_group, selection, 0)
    page = page_table[jnp.clip(geometry.slots, 0, slots - 1)[:, None], group // entries]
    is_there = is_group & (page >= 0) & (page < num_pages) & geometry.is_valid[:, None]
    return entry_pages[source, jnp.where(is_there, page, 0), group % entries], is_there


def attend(q: Array, keys: Array, is_visible: Array, attn_sink: Array) -> Array:
    """Attend to gathered keys, which are values too, with a sink in the denominator.

    s = q . key / sqrt(H); p = exp(s) / (sum exp(s) + exp(sink)); o = sum p key.

    Args:
        q: [R, N, H].
        keys: [R, K, H]; what is not visible may hold anything, NaN included.
        is_visible: bool [R, K]; a row that sees nothing gives 0.
        attn_sink: float32 [N].

    Returns:
        [R, N, H] in q's dtype.

    Source: spec/model.md section 5.
    """
    keys = jnp.where(is_visible[:, :, None], keys, 0).astype(q.dtype)
    scores = contract("rnh,rkh->rnk", q, keys) * jnp.float32(q.shape[-1] ** -0.5)
    scores = jnp.where(is_visible[:, None, :], scores, MASKED_SCORE)
    sink = attn_sink.astype(jnp.float32)[None, :, None]
    # The sink takes part in the maximum, so a row of only MASKED_SCORE stays finite.
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=MASKED_SCORE), sink)
    weights = jnp.exp(scores - highest)
    denominator = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    return round_to(contract("rnk,rkh->rnh", round_to(weights / denominator, q.dtype), keys), q.dtype)
