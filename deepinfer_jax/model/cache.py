"""What a sequence leaves behind for its next tokens.

Separate because its shapes are the memory of a running engine. Rows are stored packed in the formats
of the numerics; what has no length limit lies in pages that slots own through a table.
A sequence is shortened by its length alone: every ring keeps `window_slack` rows more than the model
reads, and entries past the length are overwritten before they are read.
Read next: `rows.py` (who reads and writes), `backbone.py` (when).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from ..arrays import NOTHING, Array
from ..config import CacheConfig, ModelConfig
from ..kernels import RowGeometry
from .numerics import Numerics
from .rows import is_among_last
from .schedule import sources_by_ratio


class CompressedPages(struct.PyTreeNode):
    """Compressed KV and index keys of the KV sources of one compress ratio, packed.

    Attributes:
        kv: [sources, P, entries, width], entries = page_tokens / ratio.
        index_keys: [sources, P, entries, width].
    """

    kv: Array
    index_keys: Array


class Cache(struct.PyTreeNode):
    """State of B slots.

    Attributes:
        window: [L + draft layers, B, window + slack, width], packed key-value rows of the latest positions,
            entry = position mod ring; what draft stages read of a position is a row like a layer's own.
        compressed: by compress ratio.
        page_table: int32 [B, pages of a slot], page of each run of `page_tokens` positions, NOTHING
            where the slot has none.
        pending_kv: float32 [ratio-2 sources, B, 1 + slack, H], projections of the latest tokens, entry
            = position mod ring; written by a token, read by the next.
        pending_score: float32, the same for the gate projection.
        engram_ids: int32 [B, ngram - 1 + slack], compressed ids of the latest tokens, entry = position
            mod ring, NOTHING for an image token.
        decoder_starts: int32 [B], first position whose window rows the decoder half has: 0, or where
            bounded prefill began.
    """

    window: Array
    compressed: dict[int, CompressedPages]
    page_table: Array
    pending_kv: Array
    pending_score: Array
    engram_ids: Array
    decoder_starts: Array


class SlotCache(struct.PyTreeNode):
    """What lies in slots and not in pages: all that a sequence needs besides its pages to go on.

    Attributes:
        window, pending_kv, pending_score, engram_ids: as in `Cache`.
    """

    window: Array
    pending_kv: Array
    pending_score: Array
    engram_ids: Array


def slot_cache(cache: Cache) -> SlotCache:
    """Take the arrays that lie in slots."""
    return SlotCache(cache.window, cache.pending_kv, cache.pending_score, cache.engram_ids)


def empty_cache(config: ModelConfig, sizes: CacheConfig, numerics: Numerics) -> Cache:
    """Make the cache of slots that own no page yet.

    Args:
        config: the architecture.
        sizes: slots, pages and slack.
        numerics: gives the formats of stored rows.

    Returns:
        The cache; its initial content is never read.

    Source: spec/model.md section 11, spec/serving.md section 2.
    """
    formats, head_dim, slots = numerics.row_formats, config.head_dim, sizes.num_slots
    compressed = {}
    for ratio, layers in sources_by_ratio(config).items():
        shape = (len(layers), sizes.num_pages, sizes.page_tokens // ratio)
        compressed[ratio] = CompressedPages(
            kv=jnp.zeros((*shape, formats.entry.width(head_dim)), formats.entry.dtype),
            index_keys=jnp.zeros(
                (*shape, formats.index_key.width(config.index_head_dim)), formats.index_key.dtype
            ),
        )
    pairs = len(sources_by_ratio(config).get(2, ()))
    slack = sizes.window_slack
    window_layers = config.num_hidden_layers + sizes.num_draft_layers
    window_shape = (window_layers, slots, config.sliding_window + slack)
    pending_shape = (pairs, slots, 1 + slack, head_dim)
    return Cache(
        window=jnp.zeros((*window_shape, formats.window.width(head_dim)), formats.window.dtype),
        compressed=compressed,
        page_table=jnp.full((slots, sizes.pages_per_slot), NOTHING, jnp.int32),
        pending_kv=jnp.zeros(pending_shape, jnp.float32),
        pending_score=jnp.zeros(pending_shape, jnp.float32),
        engram_ids=jnp.full((slots, config.engram_max_ngram_size - 1 + slack), NOTHING, jnp.int32),
        decoder_starts=jnp.zeros(slots, jnp.int32),
    )


def with_own_pages(cache: Cache) -> Cache:
    """Give every slot as many pages of its own as its table holds, in order.

    Raises:
        ValueError: fewer pages than the tables of all slots hold.
    """
    slots, per_slot = cache.page_table.shape
    num_pages = min(pages.kv.shape[1] for pages in cache.compressed.values())
    if num_pages < slots * per_slot:
        raise ValueError(
            f"cache pages: got {num_pages}, expected at least {slots} slots x {per_slot}; make more pages, "
            "or write the page table from what is free"
        )
    table = jnp.arange(slots * per_slot, dtype=jnp.int32).reshape(slots, per_slot)
    return cache.replace(page_table=table)


def read_ring(ring: Array, step_rows: Array, geometry: RowGeometry, distances: Array) -> Array:
    """Read rows some positions back: from the ring as it was before the step, or from the step's own.

    Args:
        ring: [B, entries, ...], entry = position mod entries.
        step_rows: [R, ...], this step's values.
        geometry: the step's rows.
        distances: int32 [K], positions back, at most `entries` for what lies before the step.

    Returns:
        [R, K, ...]; meaningless before the start of the sequence.
    """
    entries = ring.shape[1]
    positions = geometry.positions[:, None] - distances[None, :]
    from_ring = ring[geometry.slots[:, None], positions % entries]
    sources = jnp.arange(step_rows.shape[0], dtype=jnp.int32)[:, None] - distances[None, :]
    from_step = step_rows[jnp.maximum(sources, 0)]
    is_in_step = sources >= geometry.slot_offsets[:, None]
    is_in_step = is_in_step.reshape(is_in_step.shape + (1,) * (from_step.ndim - 2))
    return jnp.where(is_in_step, from_step, from_ring)


def ring_entries(geometry: RowGeometry, slots: int, entries: int) -> tuple[Array, Array]:
    """Give the (slot, entry) each row writes in a ring; rows that must not write get slot = slots.

    Out of range on purpose: scatters drop them.

    Returns:
        int32 [R] slots, int32 [R] entries; the pairs in range are unique.
    """
    is_written = is_among_last(geometry, entries)
    return jnp.where(is_written, geometry.slots, slots), geometry.positions % entries


def write_ring(ring: Array, step_rows: Array, geometry: RowGeometry) -> Array:
    """Write each slot's latest rows into a ring [B, entries, ...]."""
    slots, entries = ring.shape[:2]
    return ring.at[ring_entries(geometry, slots, entries)].set(step_rows, mode="drop")


def write_rings(rings: Array, step_rows: Array, geometry: RowGeometry) -> Array:
    """Write each slot's latest rows into the rings of the first layers: [L, B, entries, ...], [N, R, ...]."""
    slot, entry = ring_entries(geometry, *rings.shape[1:3])
    return rings.at[: step_rows.shape[0], slot, entry].set(step_rows, mode="drop")


def group_places(
    geometry: RowGeometry, page_table: Array, pages: CompressedPages, ratio: int
) -> tuple[Array, Array]:
    """Give the (page, entry) where each row's group is stored; rows that end no group get page = P.

    Out of range on purpose, as is a row whose slot has no page there: scatters drop them.

    Args:
        geometry: the step's rows.
        page_table: int32 [B, pages of a slot].
        pages: gives entries and pages.
        ratio: tokens of a group.

    Returns:
        int32 [R] pages, int32 [R] entries; the pairs in range are unique.
    """
    num_pages, entries = pages.kv.shape[1:3]
    groups = geometry.positions // ratio
    numbers = groups // entries
    page = page_table.at[geometry.slots, numbers].get(mode="fill", fill_value=NOTHING)
    is_group_end = geometry.is_valid & ((geometry.positions + 1) % ratio == 0)
    return jnp.where(is_group_end & (page >= 0), page, num_pages), groups % entries
