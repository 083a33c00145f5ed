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

import jax.numpy as jnp
from jax import lax

from ..arithmetic import fenced, join_tiles, map_tiles
from ..arrays import NOTHING, Array
from ..config import ModelConfig
from ..kernels import collapse, initial_streams, rms_norm
from .cache import Cache, read_ring, write_ring, write_rings
from .engram import hash_rows
from .layer_scan import layer_index, run_layers
from .linear import linear_float32
from .numerics import Numerics
from .rows import ROW_TILE, Rows, row_tiles
from .schedule import layer_kind
from .step_layer import Carry, LayerCall, StepContext, step_context, write_source
from .taps import TapRecorder
from .weights import Weights, take_layer

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

    Returns:
        Hidden states [R, D] after the final norm, the tapped values by name, the cache after it.

    Raises:
        ValueError: an unknown tap name, or rows that do not fill whole blocks.

    Source: spec/model.md sections 3 and 12.
    """
    split = _num_encoder_layers(config, encoder_layers)

    def run(cache: Cache, tile: Rows) -> tuple[Cache, tuple[Array, dict[str, Array]]]:
        step = _start(weights, config, tile, cache, _checked(numerics, config), taps)
        encoder, decoder = (0, split), (split, config.num_hidden_layers)
        carry = step.run(step.carry, step.context, encoder)
        decoder_starts = carry.cache.decoder_starts[tile.slots]
        carry = step.run(carry, step.context._replace(window_starts=decoder_starts), decoder)
        collapsed = collapse(carry.streams, carry.pre_mix)
        hidden = rms_norm(collapsed, weights.norm, config.rms_norm_eps)
        tap = step.recorder.scoped("final.")
        for name, value in (("pre_mix", carry.pre_mix), ("collapsed", collapsed), ("normed", hidden)):
            tap(name, value)
        return _write_windows(carry, step), (hidden, step.recorder.result())

    cache, (hidden, tapped) = _over_tiles(run, cache, rows, numerics)
    return hidden, tapped, cache


def encode(
    weights: Weights,
    config: ModelConfig,
    rows: Rows,
    cache: Cache,
    numerics: Numerics,
    encoder_layers: int | None = None,
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

    Returns:
        The cache after the step.

    Source: spec/model.md sections 12 and 13.
    """
    split = _num_encoder_layers(config, encoder_layers)

    def run(cache: Cache, tile: Rows) -> tuple[Cache, tuple[()]]:
        step = _start(weights, config, tile, cache, _checked(numerics, config), NO_TAPS)
        carry = step.run(step.carry, step.context, (0, split))
        kind = layer_kind(config, split)
        if kind.is_kv_source:
            index = layer_index(config, split)
            layer_weights = take_layer(weights.layers[kind.name], index.in_kind)
            carry = write_source(carry, LayerCall(layer_weights, kind, index, step.context))
        return _write_windows(carry, step, split), ()

    return _over_tiles(run, cache, rows, numerics)[0]


def head_logits(hidden: Array, weights: Weights, numerics: Numerics) -> Array:
    """Project hidden states [R, D] to logits [R, V] in float32, in the tiles of the backbone."""
    if not numerics.batch_invariant:
        return linear_float32(hidden, weights.head)
    return map_tiles(lambda tile: linear_float32(tile, weights.head), hidden, ROW_TILE)


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


def _over_tiles[T](
    run: Callable[[Cache, Rows], tuple[Cache, T]], cache: Cache, rows: Rows, numerics: Numerics
) -> tuple[Cache, T]:
    """Run rows tile by tile, each reading the cache that the one before left."""
    num_rows = rows.token_ids.shape[0]
    if num_rows % rows.rows_per_block:
        raise ValueError(f"rows: got {num_rows}, expected a multiple of rows_per_block={rows.rows_per_block}")
    if not numerics.batch_invariant:
        return run(cache, rows)
    tiles = row_tiles(rows, ROW_TILE)
    cache, results = lax.scan(lambda cache, tile: fenced(run(*fenced((cache, tile)))), cache, tiles)
    return cache, join_tiles(results, num_rows)


def _start(
    weights: Weights, config: ModelConfig, rows: Rows, cache: Cache, numerics: Numerics, taps: Taps
) -> _Step:
    """Embed the rows, hash their n-grams and prepare what the layers share."""
    context = step_context(rows, config, numerics)
    table_rows, cache = _engram_rows(weights, context, rows, cache)
    carry = _initial_carry(weights, config, rows, cache, numerics)
    return _Step(weights, context, table_rows, TapRecorder(taps), carry)


def _write_windows(carry: Carry, step: _Step, num_layers: int | None = None) -> Cache:
    """Write the step's window rows of the first `num_layers` layers, of all by default."""
    rings = carry.cache.window
    written = write_rings(rings[:num_layers], carry.window_rows[:num_layers], step.context.geometry)
    window = written if num_layers is None else rings.at[:num_layers].set(written)
    return carry.cache.replace(window=window)


def _engram_rows(weights: Weights, context: StepContext, rows: Rows, cache: Cache) -> tuple[Array, Cache]:
    """Hash every row's n-grams and keep the latest compressed ids."""
    config, geometry = context.config, context.geometry
    compressed_ids = jnp.where(rows.is_image, NOTHING, weights.token_map[rows.token_ids])
    distances = jnp.arange(config.engram_max_ngram_size, dtype=jnp.int32)
    history = read_ring(cache.engram_ids, compressed_ids, geometry, distances)
    history = jnp.where(rows.positions[:, None] < distances[None, :], NOTHING, history)
    pad_id = weights.token_map[config.engram_pad_token_id]
    table_rows = hash_rows(history, config, pad_id)
    return table_rows, cache.replace(engram_ids=write_ring(cache.engram_ids, compressed_ids, geometry))


def _initial_carry(
    weights: Weights, config: ModelConfig, rows: Rows, cache: Cache, numerics: Numerics
) -> Carry:
    num_rows = rows.token_ids.shape[0]
    embedded = weights.embed[rows.token_ids].astype(numerics.compute_dtype)
    streams, pre_mix = initial_streams(embedded, config.hc_mult)
    ratio = config.compress_ratios[config.candidate_source_layer_id]
    groups = cache.page_table.shape[1] * cache.compressed[ratio].kv.shape[2]
    blocks = -(-groups // config.candidate_block_size)
    rings = cache.window
    return Carry(
        streams=streams,
        pre_mix=pre_mix,
        cache=cache,
        window_rows=jnp.zeros((rings.shape[0], num_rows, rings.shape[3]), rings.dtype),
        selection=jnp.full((num_rows, config.index_topk), NOTHING, jnp.int32),
        is_candidate=jnp.zeros((num_rows, blocks), bool),
    )
