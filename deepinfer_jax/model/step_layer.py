"""One layer over the rows of a step: attention through the cache.

Separate from `backbone.py` so that the body of a scan can be read alone. The carry is everything
that crosses layers.
Read next: `layer.py` (what does not depend on a cache), `cache.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct

from ..arrays import Array
from ..config import ModelConfig
from . import attention, compressor, indexer
from .cache import PENDING_ROWS, Cache, CompressedCache, is_before_start, read_ring, ring_entries
from .compressor import Projection
from .layer import attention_input, finish_layer
from .numerics import Numerics
from .rope import Rotation, rotation
from .rows import Lookback, Rows, look_back
from .schedule import LayerKind
from .taps import Tap, no_tap
from .weights import LayerWeights


class Carry(struct.PyTreeNode):
    """What crosses layers.

    Attributes:
        streams: [R, M, D] residual streams.
        pre_mix: float32 [R, M], the previous site's `pre`.
        cache: compressed entries and pending halves are written as sources run; its window rings
            stay as they were before the step.
        window_rows: [L, R, H], this step's window rows, written to the rings after the last layer.
        selection: int32 [R, index_topk] of the latest index source.
        is_candidate: bool [R, blocks] of the candidate source.
    """

    streams: Array
    pre_mix: Array
    cache: Cache
    window_rows: Array
    selection: Array
    is_candidate: Array


class StepContext(NamedTuple):
    """What all layers of a step share.

    Attributes:
        config: the architecture.
        numerics: the static choice of arithmetic.
        rows: the step's rows.
        plain: rotation of window-only layers at the rows' positions.
        scaled: rotation of the other layers.
        group_starts: by compress ratio, rotation at the first token of the group that the row ends.
        window: rows of the sliding window that are in this step.
        is_in_window: bool [R, W], lookbacks that the sequence has.
    """

    config: ModelConfig
    numerics: Numerics
    rows: Rows
    plain: Rotation
    scaled: Rotation
    group_starts: dict[int, Rotation]
    window: Lookback
    is_in_window: Array


class LayerIndex(NamedTuple):
    """Where a layer stands; integers, traced inside scans.

    Attributes:
        layer: absolute layer.
        in_kind: place in its kind's weight stack.
        source: place of its KV source among the sources of its ratio.
    """

    layer: Array | int
    in_kind: Array | int
    source: Array | int


class LayerCall(NamedTuple):
    """One layer of a step.

    Attributes:
        weights: the layer's weights.
        kind: its kind (static).
        place: where it stands.
        context: what the step's layers share.
        tap: records intermediate values.
    """

    weights: LayerWeights
    kind: LayerKind
    place: LayerIndex
    context: StepContext
    tap: Tap = no_tap


def step_context(rows: Rows, config: ModelConfig, numerics: Numerics) -> StepContext:
    """Prepare what the layers share: rotations and window geometry."""
    positions = rows.positions
    return StepContext(
        config=config,
        numerics=numerics,
        rows=rows,
        plain=rotation(config, positions, is_compressed=False),
        scaled=rotation(config, positions, is_compressed=True),
        group_starts={
            ratio: rotation(config, positions - (ratio - 1), is_compressed=True) for ratio in (1, 2)
        },
        window=look_back(rows, config.sliding_window),
        is_in_window=~is_before_start(rows, config.sliding_window),
    )


def run_layer(carry: Carry, layer: LayerCall) -> Carry:
    """Apply one layer to all rows of a step.

    Args:
        carry: state that crosses layers.
        layer: the layer and what it works with.

    Returns:
        The carry after the layer.

    Source: spec/model.md section 4.
    """
    context, weights, tap = layer.context, layer.weights, layer.tap
    config, numerics = context.config, context.numerics
    x, site = attention_input(carry.streams, carry.pre_mix, weights, config, tap)
    carry, update = _attention_site(carry, x, layer)
    is_image = context.rows.is_image
    streams, pre_mix = finish_layer(carry.streams, update, site, weights, is_image, config, numerics, tap)
    return carry.replace(streams=streams, pre_mix=pre_mix)


def _attention_site(
    carry: Carry,
    x: Array,
    layer: LayerCall,
) -> tuple[Carry, Array]:
    attn, kind, index, context, tap = layer.weights.attn, layer.kind, layer.place, layer.context, layer.tap
    rows, config, numerics = context.rows, context.config, context.numerics
    table = context.plain if kind.role == "window" else context.scaled
    queries = attention.make_queries(x, table, attn, config, numerics)
    window_row = attention.window_key_value(x, table, attn, config, numerics)
    tap("attn.qr", queries.qr)
    tap("attn.q", queries.q)
    tap("attn.window_kv", window_row)
    if kind.is_kv_source:
        carry = _write_entries(carry, x, layer)
    if kind.is_index_source:
        carry = _select_entries(carry, x, queries.qr, layer)
    keys = read_ring(carry.cache.window[index.layer], window_row, rows, context.window)
    is_visible = context.is_in_window
    if kind.ratio:
        entries = carry.cache.compressed[kind.ratio].kv[index.source]
        selected, is_there = attention.gather_entries(entries, rows.slots, carry.selection)
        keys = jnp.concatenate([keys, selected], axis=1)
        is_visible = jnp.concatenate([is_visible, is_there], axis=1)
    o = attention.attend(queries.q, keys, is_visible, attn.attn_sink)
    o = attention.unrotate(o, table)
    tap("attn.o", o)
    window_rows = carry.window_rows.at[index.layer].set(window_row)
    return carry.replace(window_rows=window_rows), attention.project_output(o, attn, config, numerics)


def _write_entries(carry: Carry, x: Array, layer: LayerCall) -> Carry:
    """Compress the groups that end in this step and write them where they are read from."""
    kind, index, context, tap = layer.kind, layer.place, layer.context, layer.tap
    rows, cache, attn = context.rows, carry.cache, layer.weights.attn
    projection = compressor.project(x, attn.compressor)
    pooled = projection.kv
    if projection.score is not None:
        pair = look_back(rows, PENDING_ROWS)
        older = Projection(
            read_ring(cache.pending_kv[index.source], projection.kv, rows, pair)[:, 1],
            read_ring(cache.pending_score[index.source], projection.score, rows, pair)[:, 1],
        )
        pooled = compressor.pool_pair(older, projection)
        tap("compressor.kv", projection.kv)
        tap("compressor.score", projection.score)
        cache = _write_pending(cache, projection, index, rows)
    starts = context.group_starts[kind.ratio]
    entry = compressor.make_entry(
        pooled, starts, attn.compressor, attn.indexer, context.config, context.numerics
    )
    tap("compressor.latent", entry.latent)
    tap("attn.compressed_kv", entry.kv)
    tap("indexer.k", entry.index_key)

    old = cache.compressed[kind.ratio]
    is_group_end = rows.is_valid & ((rows.positions + 1) % kind.ratio == 0)
    # Rows that end no group aim past the last slot, and the scatter drops them.
    slots = jnp.where(is_group_end, rows.slots, old.kv.shape[1])
    groups = rows.positions // kind.ratio
    new = CompressedCache(
        kv=old.kv.at[index.source, slots, groups].set(entry.kv, mode="drop"),
        index_keys=old.index_keys.at[index.source, slots, groups].set(entry.index_key, mode="drop"),
    )
    return carry.replace(cache=cache.replace(compressed={**cache.compressed, kind.ratio: new}))


def _write_pending(cache: Cache, projection: Projection, index: LayerIndex, rows: Rows) -> Cache:
    slots, entries = ring_entries(rows, cache.pending_kv.shape[1], PENDING_ROWS)
    place = (index.source, slots, entries)
    return cache.replace(
        pending_kv=cache.pending_kv.at[place].set(projection.kv, mode="drop"),
        pending_score=cache.pending_score.at[place].set(projection.score, mode="drop"),
    )


def _select_entries(carry: Carry, x: Array, qr: Array, layer: LayerCall) -> Carry:
    """Score all entries of each row's slot and select the best visible ones."""
    kind, context, tap, weights = layer.kind, layer.context, layer.tap, layer.weights.attn.indexer
    rows, config = context.rows, context.config
    queries = indexer.index_queries(qr, context.scaled, weights, config, context.numerics)
    heads = indexer.head_weights(x, weights, config)
    per_block = rows.rows_per_block
    blocks = rows.slots.shape[0] // per_block
    block_slots = rows.slots.reshape(blocks, per_block)[:, 0]
    keys = carry.cache.compressed[kind.ratio].index_keys[layer.place.source][block_slots]
    scores = indexer.index_scores(
        queries.reshape(blocks, per_block, *queries.shape[1:]), heads.reshape(blocks, per_block, -1), keys
    ).reshape(rows.slots.shape[0], -1)
    num_visible = compressor.num_visible_groups(rows.positions, kind.ratio)
    masked = indexer.mask_invisible(scores, num_visible)
    is_candidate = carry.is_candidate
    if kind.candidates == "source":
        is_candidate = indexer.candidate_blocks(masked, num_visible, config)
        tap("indexer.candidates", is_candidate)
    elif kind.candidates == "restricted":
        masked = indexer.restrict_to_candidates(masked, is_candidate, config)
    selection = indexer.select(masked, config)
    for name, value in (("q", queries), ("weights", heads), ("score", scores), ("score_masked", masked)):
        tap(f"indexer.{name}", value)
    tap("indexer.topk_ids", selection)
    return carry.replace(selection=selection, is_candidate=is_candidate)
