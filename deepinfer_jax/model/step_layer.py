"""One layer over the rows of a step: attention through the cache.

Separate from `backbone.py` so that the body of a scan can be read alone. The carry is everything
that crosses layers.
Read next: `layer.py` (what does not depend on a cache), `cache.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct

from ..arithmetic import fenced
from ..arrays import Array
from ..config import ModelConfig
from ..kernels import RowGeometry, index_top_k, pack_rows, sparse_attention, unpack_rows
from ..sharding.exchange import Placement, all_gather
from . import attention, compressor, indexer
from .cache import Cache, CompressedPages, group_places, read_ring, ring_entries, write_ring
from .compressor import Projection
from .layer import attention_input, finish_layer
from .moe import TokenRoles
from .numerics import Numerics
from .rope import Rotation, rotation
from .rows import StepRows, row_geometry
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
        window_rows: [L, R, width], this step's packed window rows, of all devices that share its
            sequences, written to the rings after the last layer.
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
        geometry: where the step's rows stand.
        roles: what they are.
        plain: rotation of window-only layers at the rows' positions.
        scaled: rotation of the other layers.
        group_starts: by compress ratio, rotation at the first token of the group that the row ends.
        window_starts: int32 [R], first position whose window row exists.
        placement: this device's among those of the mesh (static).
        written: where the rows stand that go into this device's cache: its own, and those of the devices
            with which it shares its sequences.
        earlier: the same rows, valid if they come before this device's; None without such devices.
    """

    config: ModelConfig
    numerics: Numerics
    geometry: RowGeometry
    roles: TokenRoles
    plain: Rotation
    scaled: Rotation
    group_starts: dict[int, Rotation]
    window_starts: Array
    placement: Placement
    written: RowGeometry
    earlier: RowGeometry | None


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


def step_context(
    rows: StepRows, config: ModelConfig, numerics: Numerics, placement: Placement
) -> StepContext:
    """Prepare what the layers share: rotations, and windows that reach back to the sequence's start.

    Args:
        rows: this device's rows among those of its sequences.
        config: the architecture.
        numerics: the static choice of arithmetic.
        placement: this device's.

    Returns:
        The context.
    """
    written, own, earlier = row_geometry(rows.shared), rows.own, rows.earlier_mask
    positions = own.positions
    return StepContext(
        config=config,
        numerics=numerics,
        placement=placement,
        written=written,
        earlier=None if earlier is None else written.replace(is_valid=written.is_valid & earlier),
        geometry=row_geometry(own),
        roles=TokenRoles(own.is_image, own.is_valid),
        plain=rotation(config, positions, is_compressed=False),
        scaled=rotation(config, positions, is_compressed=True),
        group_starts={
            ratio: rotation(config, positions - (ratio - 1), is_compressed=True) for ratio in (1, 2)
        },
        window_starts=jnp.zeros_like(positions),
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
    x, site = attention_input(carry.streams, carry.pre_mix, weights, config, numerics, tap)
    carry, update = _attention_site(carry, x, layer)
    streams, pre_mix = finish_layer(
        *(carry.streams, update, site, weights, layer.place.in_kind, context.roles, config, numerics, tap),
        placement=context.placement,
    )
    return carry.replace(streams=streams, pre_mix=pre_mix)


def write_source(carry: Carry, layer: LayerCall) -> Carry:
    """Run of a KV source only what later tokens read of it: its compressor and index keys.

    Args:
        carry: state that crosses layers.
        layer: the source.

    Returns:
        The carry with the cache written and the streams as they were.

    Source: spec/model.md section 12.
    """
    context = layer.context
    x, _ = attention_input(
        *(carry.streams, carry.pre_mix, layer.weights, context.config, context.numerics, layer.tap)
    )
    return _write_entries(carry, x, layer)


def _attention_site(carry: Carry, x: Array, layer: LayerCall) -> tuple[Carry, Array]:
    attn, kind, place, context, tap = layer.weights.attn, layer.kind, layer.place, layer.context, layer.tap
    config, numerics = context.config, context.numerics
    formats = numerics.row_formats
    table = context.plain if kind.role == "window" else context.scaled
    queries = attention.make_queries(x, table, attn, config, numerics)
    window_row = attention.window_key_value(x, table, attn, config, numerics)
    packed_row = fenced(pack_rows(window_row, formats.window, implementation=numerics.implementation))
    tap("attn.qr", queries.qr)
    tap("attn.q", queries.q)
    tap("attn.window_kv", unpack_rows(packed_row, formats.window, x.dtype))
    if kind.is_kv_source:
        carry = _write_entries(carry, x, layer)
    if kind.is_index_source:
        carry = _select_entries(carry, x, queries.qr, layer)
    carry = _share_window_row(carry, packed_row, layer)
    cache = carry.cache
    o = sparse_attention(
        *(queries.q, cache.window, jnp.int32(place.layer), packed_row),
        cache.compressed[kind.ratio].kv if kind.ratio else None,
        *(jnp.int32(place.source), cache.page_table, carry.selection if kind.ratio else None),
        *(attn.attn_sink, context.geometry, context.window_starts),
        window=config.sliding_window,
        cache_format=formats,
        implementation=numerics.implementation,
    )
    o = attention.unrotate(o, table)
    tap("attn.o", o)
    return carry, attention.project_output(o, attn, config, numerics, context.placement)


def _share_window_row(carry: Carry, packed_row: Array, layer: LayerCall) -> Carry:
    """Keep the step's window rows for the rings; those of earlier devices go there at once, to be read."""
    index, context = layer.place.layer, layer.context
    # Packed row, over the sequence axes.
    shared = _share(packed_row, context)
    carry = carry.replace(window_rows=carry.window_rows.at[index].set(shared))
    if context.earlier is None:
        return carry
    rings = carry.cache.window
    slot, entry = ring_entries(context.earlier, *rings.shape[1:3])
    return carry.replace(
        cache=carry.cache.replace(window=rings.at[index, slot, entry].set(shared, mode="drop"))
    )


def _share(values: Array, context: StepContext) -> Array:
    """Join what the devices that share their sequences computed, in the order of the rows."""
    return all_gather(values, context.placement.layout.sequence_axes)


def _write_entries(carry: Carry, x: Array, layer: LayerCall) -> Carry:
    """Compress the groups that end in this step and write them where they are read from."""
    kind, place, context, tap = layer.kind, layer.place, layer.context, layer.tap
    cache, attn, formats = carry.cache, layer.weights.attn, context.numerics.row_formats
    projection = compressor.project(x, attn.compressor)
    pooled = projection.kv
    if projection.score is not None:
        # 4 H bytes a row each, over the sequence axes.
        kv, score = _share(projection.kv, context), _share(projection.score, context)
        older = Projection(
            _previous(cache.pending_kv[place.source], projection.kv, kv, context),
            _previous(cache.pending_score[place.source], projection.score, score, context),
        )
        # Not to be fused with an exchange that only some layouts have; and what is read before it is written
        # is not copied.
        older, own, rings = fenced((older, projection, (cache.pending_kv, cache.pending_score)))
        pooled = compressor.pool_pair(older, own)
        tap("compressor.kv", projection.kv)
        tap("compressor.score", projection.score)
        cache = cache.replace(pending_kv=rings[0], pending_score=rings[1])
        cache = _write_pending(cache, Projection(kv, score), place, context.written)
    starts = context.group_starts[kind.ratio]
    entry = compressor.make_entry(
        pooled, starts, attn.compressor, attn.indexer, context.config, context.numerics
    )
    implementation = context.numerics.implementation
    kv = fenced(pack_rows(entry.kv, formats.entry, implementation=implementation))
    index_key = fenced(pack_rows(entry.index_key, formats.index_key, implementation=implementation))
    tap("compressor.latent", entry.latent)
    tap("attn.compressed_kv", unpack_rows(kv, formats.entry, x.dtype))
    tap("indexer.k", unpack_rows(index_key, formats.index_key, x.dtype))

    pages = cache.compressed[kind.ratio]
    at = (place.source, *group_places(context.written, cache.page_table, pages, kind.ratio))
    # Packed entry and packed index key, over the sequence axes.
    new = CompressedPages(
        kv=pages.kv.at[at].set(_share(kv, context), mode="drop"),
        index_keys=pages.index_keys.at[at].set(_share(index_key, context), mode="drop"),
    )
    return carry.replace(cache=cache.replace(compressed={**cache.compressed, kind.ratio: new}))


def _previous(ring: Array, own: Array, shared: Array, context: StepContext) -> Array:
    """Read each row's predecessor: this device's, one of an earlier device, or of the step before."""
    if context.earlier is not None:
        ring = write_ring(ring, shared, context.earlier)
    return read_ring(ring, own, context.geometry, jnp.ones(1, jnp.int32))[:, 0]


def _write_pending(cache: Cache, projection: Projection, place: LayerIndex, geometry: RowGeometry) -> Cache:
    at = (place.source, *ring_entries(geometry, *cache.pending_kv.shape[1:3]))
    return cache.replace(
        pending_kv=cache.pending_kv.at[at].set(projection.kv, mode="drop"),
        pending_score=cache.pending_score.at[at].set(projection.score, mode="drop"),
    )


def _select_entries(carry: Carry, x: Array, qr: Array, layer: LayerCall) -> Carry:
    """Score all entries of each row's slot and select the best visible ones."""
    kind, context, tap, weights = layer.kind, layer.context, layer.tap, layer.weights.attn.indexer
    config, numerics, cache = context.config, context.numerics, carry.cache
    queries = indexer.index_queries(qr, context.scaled, weights, config, numerics)
    heads = indexer.head_weights(x, weights, config)
    result = index_top_k(
        *(queries, heads, cache.compressed[kind.ratio].index_keys, jnp.int32(layer.place.source)),
        *(cache.page_table, compressor.num_visible_groups(context.geometry.positions, kind.ratio)),
        *(carry.is_candidate if kind.candidates == "restricted" else None, context.geometry),
        top_k=config.index_topk,
        candidates=indexer.candidate_rule(kind, config),
        key_format=numerics.row_formats.index_key,
        want_scores=tap is not no_tap,
        implementation=numerics.implementation,
    )
    for name, value in (("q", queries), ("weights", heads), ("topk_ids", result.selection)):
        tap(f"indexer.{name}", value)
    if result.scores is not None and result.masked_scores is not None:
        tap("indexer.score", result.scores)
        tap("indexer.score_masked", result.masked_scores)
    carry = carry.replace(selection=result.selection)
    if kind.candidates != "source" or result.is_candidate is None:
        return carry
    tap("indexer.candidates", result.is_candidate)
    return carry.replace(is_candidate=result.is_candidate)
