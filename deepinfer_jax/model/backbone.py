"""The backbone: rows in, hidden states out.

One function serves prefill chunks, decode tokens and draft blocks. Layers of equal kind are
stacked and scanned, so compile time follows the number of different patterns, not the depth. Rows
run through all layers in tiles of one size, one tile after the other, so that a row's result is
bitwise the same in any step.
Read next: `layer_scan.py` (the layers in order), `step_layer.py` (one of them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..arithmetic import fenced, join_tiles, map_tiles, map_used_tiles, scan_rows, zeros_of
from ..arrays import NOTHING, Array
from ..config import ModelConfig
from ..kernels import collapse, initial_streams, rms_norm
from ..sharding.exchange import (
    Placement,
    all_gather,
    axes_index,
    axes_size,
    bring_columns,
    bring_rows,
    from_words,
    meeting,
    put_together,
    to_words,
)
from ..sharding.layout import SINGLE, Layout
from .cache import Cache, read_ring, write_ring, write_rings
from .draft_rows import put_draft_rows, read_draft_input
from .engram import hash_rows
from .layer_scan import layer_index, run_layers
from .linear import linear_float32
from .numerics import Numerics
from .rows import Rows, StepRows, own_rows, row_tiles
from .schedule import layer_kind
from .step_layer import Carry, LayerCall, StepContext, step_context, write_source
from .taps import TapRecorder
from .weights import Weights, layer_words, take_layer

type Taps = frozenset[str]

NO_TAPS: Taps = frozenset()


def backbone(
    weights: Weights,
    config: ModelConfig,
    rows: Rows,
    cache: Cache,
    numerics: Numerics,
    taps: Taps = NO_TAPS,
    encoder_layers: int | None = None,
    layout: Layout = SINGLE,
) -> tuple[Array, dict[str, Array], Cache]:
    """Run all layers on the rows of a step.

    Any split of a sequence into steps gives the same result: bitwise if the numerics are batch
    invariant, up to rounding otherwise.

    Args:
        weights: the loaded weights.
        config: the architecture (static).
        rows: the step's rows.
        cache: state of the slots before the step; consumed.
        numerics: the choice of arithmetic (static).
        taps: names of intermediate values to return (static), such as "layers.3.attn.q",
            "layers.3.out", "final.normed". A segment of layers with a tap is not scanned.
        encoder_layers: layers that saw every row of the prompt (static); the windows of the others
            begin at the cache's `decoder_starts`. The layers before the last KV source by default.
        layout: on the mesh of the surrounding `shard_map` (static). Then all arrays are this device's
            shares, and `rows` those of all devices that share its sequences.

    Returns:
        Hidden states [R, D] after the final norm, of the rows that `own_row_ids` gives, the tapped values
        by name, the cache after it.

    Raises:
        ValueError: an unknown tap name, or rows that do not fill whole blocks.

    Source: spec/model.md sections 3 and 12.
    """
    split = _num_encoder_layers(config, encoder_layers)

    def run(cache: Cache, tile: Rows, placement: Placement) -> tuple[Cache, tuple[Array, dict[str, Array]]]:
        step = _start(weights, config, tile, cache, _checked(numerics, config), taps, placement)
        encoder, decoder = (0, split), (split, config.num_hidden_layers)
        carry = step.run(step.carry, step.context, encoder)
        decoder_starts = carry.cache.decoder_starts[step.context.geometry.slots]
        carry = _run_decoder(carry, step, step.context._replace(window_starts=decoder_starts), decoder)
        collapsed = collapse(carry.streams, carry.pre_mix)
        hidden = rms_norm(collapsed, weights.norm, config.rms_norm_eps)
        tap = step.recorder.scoped("final.")
        for name, value in (("pre_mix", carry.pre_mix), ("collapsed", collapsed), ("normed", hidden)):
            tap(name, value)
        return _write_windows(carry, step), (hidden, step.recorder.result())

    cache, (hidden, tapped) = _over_tiles(run, cache, rows, numerics, layout)
    return hidden, tapped, cache


def encode(
    weights: Weights,
    config: ModelConfig,
    rows: Rows,
    cache: Cache,
    numerics: Numerics,
    encoder_layers: int | None = None,
    layout: Layout = SINGLE,
) -> Cache:
    """Run on the rows of a prompt only what tokens beyond the window read of them.

    That is the encoder half, and of the last KV source its compressor and index keys: all that a row
    far from the end of a prompt leaves behind, if the decoder half is replayed on the last rows.

    Args:
        weights: the loaded weights.
        config: the architecture (static).
        rows: the step's rows.
        cache: state of the slots before the step; consumed.
        numerics: the choice of arithmetic (static).
        encoder_layers: layers to run in full (static), those before the last KV source by default.
        layout: as in `backbone` (static).

    Returns:
        The cache after the step.

    Source: spec/model.md sections 12 and 13.
    """
    split = _num_encoder_layers(config, encoder_layers)

    def run(cache: Cache, tile: Rows, placement: Placement) -> tuple[Cache, tuple[()]]:
        step = _start(weights, config, tile, cache, _checked(numerics, config), NO_TAPS, placement)
        carry = step.run(step.carry, step.context, (0, split))
        kind = layer_kind(config, split)
        if kind.is_kv_source:
            index = layer_index(config, split)
            layer_weights = take_layer(weights.layers[kind.name], index.in_kind)
            layer_weights = put_together(layer_weights, layer_words(config, kind), layout)
            carry = write_source(carry, LayerCall(layer_weights, kind, index, step.context))
        return _write_windows(carry, step, split), ()

    return _over_tiles(run, cache, rows, numerics, layout)[0]


def head_logits(
    hidden: Array,
    weights: Weights,
    numerics: Numerics,
    layout: Layout = SINGLE,
    is_used: Array | None = None,
) -> Array:
    """Project hidden states to logits in float32, in the tiles of the backbone.

    Args:
        hidden: [R, D], rows of this device's slots.
        weights: the loaded weights.
        numerics: the choice of arithmetic (static).
        layout: as in `backbone` (static).
        is_used: bool [R], rows whose logits are wanted; all by default.

    Returns:
        float32 [R, V], of the whole vocabulary.
    """
    own, rest = meeting(layout, "vocab")
    # D values a row to the holders of the vocabulary; 4 V bytes a row home.
    shown = from_words(all_gather(to_words(hidden), own), hidden) if own else hidden
    if numerics.batch_invariant and is_used is not None and layout == SINGLE:
        logits = map_used_tiles(
            lambda tile: linear_float32(tile, weights.head), shown, is_used, numerics.row_tile
        )
    elif numerics.batch_invariant:
        logits = map_tiles(lambda tile: linear_float32(tile, weights.head), shown, numerics.row_tile)
    else:
        logits = linear_float32(shown, weights.head)
    return bring_columns(logits, layout.axes_of("vocab"), own, rest)


def own_row_ids(num_rows: int, numerics: Numerics, layout: Layout) -> Array:
    """Number the rows whose hidden states `backbone` returns on this device.

    Args:
        num_rows: rows of the step, of all devices that share their sequences.
        numerics: the choice of arithmetic (static).
        layout: as in `backbone` (static).

    Returns:
        int32, for each returned row its place among the step's rows; out of range for padding.
    """
    axes = layout.sequence_axes
    count, share = axes_size(axes), _rows_of_device(num_rows, numerics, axes_size(axes))
    tiles = -(-num_rows // (share * count))
    own = axes_index(axes) * share + jnp.arange(share, dtype=jnp.int32)
    return (jnp.arange(tiles, dtype=jnp.int32)[:, None] * (share * count) + own[None, :]).reshape(-1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What one pass of rows through the layers works with."""

    weights: Weights
    context: StepContext
    table_rows: Array
    recorder: TapRecorder
    carry: Carry

    def run(self, carry: Carry, context: StepContext, span: tuple[int, int]) -> Carry:
        """Run some of the layers."""
        return run_layers(carry, self.weights, context, self.table_rows, self.recorder, span)


def _num_encoder_layers(config: ModelConfig, encoder_layers: int | None) -> int:
    return config.kv_source_layer_ids[-1] if encoder_layers is None else encoder_layers


def _checked(numerics: Numerics, config: ModelConfig) -> Numerics:
    """Quantise activations only for a checkpoint that stores its weights quantised."""
    return dataclasses.replace(
        numerics, quantizes_activations=numerics.quantizes_activations and config.is_quantized
    )


def _rows_of_device(num_rows: int, numerics: Numerics, num_devices: int) -> int:
    """Count the rows that each of the devices that share their sequences runs at once."""
    return numerics.row_tile if numerics.batch_invariant else -(-num_rows // num_devices)


def _over_tiles[T](
    run: Callable[[Cache, Rows, Placement], tuple[Cache, T]],
    cache: Cache,
    rows: Rows,
    numerics: Numerics,
    layout: Layout,
) -> tuple[Cache, T]:
    """Run rows tile by tile, each reading the cache that the one before left.

    Devices that share their sequences run adjacent tiles at the same time.
    """
    num_rows = rows.token_ids.shape[0]
    if num_rows % rows.rows_per_block:
        raise ValueError(f"rows: got {num_rows}, expected a multiple of rows_per_block={rows.rows_per_block}")
    num_devices = axes_size(layout.sequence_axes)
    share = _rows_of_device(num_rows, numerics, num_devices)
    placement = Placement(layout, min(num_rows, share))
    if not numerics.batch_invariant and num_devices == 1:
        return run(cache, rows, placement)
    tiles = row_tiles(rows, share * num_devices)

    num_tiles = tiles.slots.shape[0]

    def step(cache: Cache, tile: Rows) -> tuple[Cache, T]:
        return fenced(run(*fenced((cache, tile)), placement))

    # Traced once, though its shapes are asked for before it is called.
    traced_step = jax.jit(step, inline=True)

    def step_if_used(cache: Cache, tile: Rows) -> tuple[Cache, T]:
        skipped = zeros_of(lambda *arguments: traced_step(*arguments)[1], cache, tile)
        return lax.cond(tile.is_valid.any(), traced_step, lambda cache, _: (cache, skipped), cache, tile)

    # Devices that meet in a tile must all run it, used or not.
    may_skip = num_tiles > 1 and layout == SINGLE
    cache, results = scan_rows(step_if_used if may_skip else step, cache, tiles)
    return cache, join_tiles(results, num_rows if num_devices == 1 else num_tiles * share)


def _start(
    weights: Weights,
    config: ModelConfig,
    tile: Rows,
    cache: Cache,
    numerics: Numerics,
    taps: Taps,
    placement: Placement,
) -> _Step:
    """Embed the rows, hash their n-grams and prepare what the layers share."""
    axes = placement.layout.sequence_axes
    rows = own_rows(tile, axes_size(axes), axes_index(axes))
    context = step_context(rows, config, numerics, placement)
    table_rows, cache = _engram_rows(weights, context, rows, cache)
    carry = _initial_carry(weights, rows, cache, context)
    return _Step(weights, context, table_rows, TapRecorder(taps), carry)


def _run_decoder(carry: Carry, step: _Step, context: StepContext, span: tuple[int, int]) -> Carry:
    """Run the decoder half, and make of what enters the target layers the rows that draft stages read.

    The layers are cut at the targets and their streams fenced whether anything is drafted or not, so that
    drafting changes no bit of what comes out.
    """
    targets = [target for target in context.config.draft.target_layer_ids if target >= span[0]]
    inputs, layer = [], span[0]
    for stop in (*targets, span[1]):
        if stop > layer:
            carry, layer = step.run(carry, context, (layer, stop)), stop
        if stop in targets:
            carry = carry.replace(streams=fenced(carry.streams))
            inputs.append(read_draft_input(carry.streams, context.numerics))
    # Without the stages' weights their rows stay zero: no draft is to read them.
    if carry.cache.window.shape[0] == context.config.num_hidden_layers or step.weights.draft is None:
        return carry
    if len(inputs) < len(context.config.draft.target_layer_ids):
        raise ValueError(
            f"draft targets {context.config.draft.target_layer_ids}: got a decoder half that begins at layer "
            f"{span[0]}, expected all of them in it; use fewer encoder layers"
        )
    return put_draft_rows(carry, inputs, step.weights.draft, context)


def _write_windows(carry: Carry, step: _Step, num_layers: int | None = None) -> Cache:
    """Write the step's window rows of the first `num_layers` layers, of all by default.

    Fenced with the streams, which come after all that reads the rings: XLA would otherwise copy them, as it
    does not know whether the last layer has read them when they are written.
    """
    rings, _ = fenced((carry.cache.window, carry.streams))
    return carry.cache.replace(
        window=write_rings(rings, carry.window_rows[:num_layers], step.context.written)
    )


def _engram_rows(weights: Weights, context: StepContext, rows: StepRows, cache: Cache) -> tuple[Array, Cache]:
    """Hash every row's n-grams and keep the latest compressed ids."""
    config = context.config

    def compress(rows: Rows) -> Array:
        return jnp.where(rows.is_image, NOTHING, weights.token_map[rows.token_ids])

    shared = compress(rows.shared)
    ring, own = cache.engram_ids, shared
    if context.earlier is not None:
        ring, own = write_ring(ring, shared, context.earlier), compress(rows.own)
    distances = jnp.arange(config.engram_max_ngram_size, dtype=jnp.int32)
    # Read before it is written, see `_write_windows`.
    history, written = fenced((read_ring(ring, own, context.geometry, distances), cache.engram_ids))
    history = jnp.where(rows.own.positions[:, None] < distances[None, :], NOTHING, history)
    pad_id = weights.token_map[config.engram_pad_token_id]
    table_rows = hash_rows(history, config, pad_id)
    return table_rows, cache.replace(engram_ids=write_ring(written, shared, context.written))


def _initial_carry(weights: Weights, rows: StepRows, cache: Cache, context: StepContext) -> Carry:
    config, num_rows = context.config, rows.own.token_ids.shape[0]
    # 4 bytes a row to every holder of the vocabulary, D values back.
    table, ids = bring_rows(weights.embed, rows.own.token_ids[:, None], "vocab", context.placement)
    embedded = fenced(table[ids[:, 0]].astype(context.numerics.compute_dtype))
    streams, pre_mix = initial_streams(embedded, config.hc_mult)
    ratio = config.compress_ratios[config.candidate_source_layer_id]
    groups = cache.page_table.shape[1] * cache.compressed[ratio].kv.shape[2]
    blocks = -(-groups // config.candidate_block_size)
    rings = cache.window
    return Carry(
        streams=streams,
        pre_mix=pre_mix,
        cache=cache,
        window_rows=jnp.zeros((rings.shape[0], rows.shared.slots.shape[0], rings.shape[3]), rings.dtype),
        selection=jnp.full((num_rows, config.index_topk), NOTHING, jnp.int32),
        is_candidate=jnp.zeros((num_rows, blocks), bool),
    )
