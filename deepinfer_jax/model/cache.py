"""What a sequence leaves behind for its next tokens.

Separate because its shapes are the memory of a running engine. Values are stored as the numerics
produce them: already quantised and dequantised under `official`.
Read next: `rows.py` (who reads and writes), `backbone.py` (when).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from ..arrays import NOTHING, Array
from ..config import ModelConfig
from .numerics import Numerics
from .rows import Lookback, Rows, is_among_last
from .schedule import sources_by_ratio


class CompressedCache(struct.PyTreeNode):
    """Compressed KV and index keys of the KV sources of one compress ratio.

    Attributes:
        kv: [sources, B, G, H], written once per group of `ratio` tokens.
        index_keys: [sources, B, G, index_head_dim].
    """

    kv: Array
    index_keys: Array


class Cache(struct.PyTreeNode):
    """State of B slots.

    Attributes:
        window: [L, B, ring, H], key-value rows of the latest positions, entry = position mod ring.
        compressed: by compress ratio.
        pending_kv: float32 [ratio-2 sources, B, 2, H], projections of tokens whose group is not
            complete, entry = position mod 2; written by the token, read by the next.
        pending_score: float32, the same for the gate projection.
        engram_ids: int32 [B, ngram - 1], compressed ids of the latest tokens, entry = position mod
            (ngram - 1), NOTHING for an image token.
    """

    window: Array
    compressed: dict[int, CompressedCache]
    pending_kv: Array
    pending_score: Array
    engram_ids: Array


PENDING_ROWS = 2
"""Tokens whose compressor projections are kept: one group."""


def empty_cache(config: ModelConfig, slots: int, capacity: int, numerics: Numerics) -> Cache:
    """Make the cache of `slots` sequences of up to `capacity` tokens.

    Args:
        config: the architecture.
        slots: number of sequences.
        capacity: tokens per sequence, a multiple of 2.
        numerics: gives the dtype of stored rows.

    Returns:
        The cache; its initial content is never read.

    Raises:
        ValueError: an odd or non-positive capacity.

    Source: spec/model.md section 11.
    """
    if capacity <= 0 or capacity % 2:
        raise ValueError(f"cache capacity: got {capacity}, expected a positive even number of tokens")
    dtype, head_dim = numerics.compute_dtype, config.head_dim
    compressed = {}
    for ratio, layers in sources_by_ratio(config).items():
        shape = (len(layers), slots, capacity // ratio)
        compressed[ratio] = CompressedCache(
            kv=jnp.zeros((*shape, head_dim), dtype),
            index_keys=jnp.zeros((*shape, config.index_head_dim), dtype),
        )
    pairs = len(sources_by_ratio(config).get(2, ()))
    pending_shape = (pairs, slots, PENDING_ROWS, head_dim)
    window_shape = (config.num_hidden_layers, slots, config.sliding_window, head_dim)
    return Cache(
        window=jnp.zeros(window_shape, dtype),
        compressed=compressed,
        pending_kv=jnp.zeros(pending_shape, jnp.float32),
        pending_score=jnp.zeros(pending_shape, jnp.float32),
        engram_ids=jnp.full((slots, config.engram_max_ngram_size - 1), NOTHING, jnp.int32),
    )


def read_ring(ring: Array, step_rows: Array, rows: Rows, lookback: Lookback) -> Array:
    """Read what a ring held before the step, or this step's own row, k positions back.

    Args:
        ring: [B, entries, ...], entry = position mod entries.
        step_rows: [R, ...], this step's values.
        rows: the step's rows.
        lookback: of `count` positions, at most entries + 1.

    Returns:
        [R, count, ...]; meaningless before the start of the sequence (`is_before_start`).
    """
    slots, entries = ring.shape[:2]
    count = lookback.rows.shape[1]
    positions = rows.positions[:, None] - jnp.arange(count, dtype=jnp.int32)[None, :]
    from_ring = rows.slots[:, None] * entries + positions % entries
    index = jnp.where(lookback.is_in_step, slots * entries + lookback.rows, from_ring)
    both = jnp.concatenate([ring.reshape(slots * entries, *ring.shape[2:]), step_rows])
    return both[index]


def is_before_start(rows: Rows, count: int) -> Array:
    """Tell which of the `count` latest positions of each row lie before the sequence's start.

    Returns:
        bool [R, count].
    """
    return rows.positions[:, None] < jnp.arange(count, dtype=jnp.int32)[None, :]


def ring_entries(rows: Rows, slots: int, entries: int) -> tuple[Array, Array]:
    """Give the (slot, entry) each row writes in a ring; rows that must not write get slot = slots.

    Out of range on purpose: scatters drop them.

    Returns:
        int32 [R] slots, int32 [R] entries; the pairs in range are unique.
    """
    is_written = is_among_last(rows, entries)
    return jnp.where(is_written, rows.slots, slots), rows.positions % entries


def write_ring(ring: Array, step_rows: Array, rows: Rows) -> Array:
    """Write each slot's latest rows into a ring [B, entries, ...]."""
    slots, entries = ring.shape[:2]
    slot, entry = ring_entries(rows, slots, entries)
    return ring.at[slot, entry].set(step_rows.astype(ring.dtype), mode="drop")
