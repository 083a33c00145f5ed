"""The backbone: rows in, hidden states out.

One function serves prefill chunks, decode tokens and draft blocks. Layers of equal kind are
stacked and scanned, so compile time follows the number of different patterns, not the depth.
Read next: `step_layer.py` (the body of the scans), `schedule.py` (the order).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import NOTHING, Array
from ..config import ModelConfig
from . import hyper
from .cache import Cache, is_before_start, read_ring, write_ring
from .engram import engram, hash_rows
from .linear import linear_float32
from .norm import rms_norm
from .numerics import Numerics
from .rows import Rows, look_back
from .schedule import LayerKind, Segment, layer_kind, layers_by_kind, make_schedule, sources_by_ratio
from .step_layer import Carry, LayerCall, LayerIndex, StepContext, run_layer, step_context
from .taps import Tap, TapRecorder, no_tap
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
) -> tuple[Array, dict[str, Array], Cache]:
    """Run all layers on the rows of a step.

    The encoder half (layers before the last KV source) and the decoder half run one after the other
    on the same rows. Any split of a sequence into steps gives the same result up to rounding.

    Args:
        weights: the loaded weights.
        config: the architecture (static).
        rows: the step's rows.
        cache: state of the slots before the step; consumed.
        numerics: the choice of arithmetic (static).
        taps: names of intermediate values to return (static), such as "layers.3.attn.q",
            "layers.3.out", "final.normed". A segment of layers with a tap is not scanned.

    Returns:
        Hidden states [R, D] after the final norm, the tapped values by name, the cache after it.

    Raises:
        ValueError: an unknown tap name, or rows that do not fill whole blocks.

    Source: spec/model.md sections 3 and 12.
    """
    num_rows = rows.token_ids.shape[0]
    if num_rows % rows.rows_per_block:
        raise ValueError(f"rows: got {num_rows}, expected a multiple of rows_per_block={rows.rows_per_block}")
    if numerics.quantizes_activations and not config.is_quantized:
        numerics = dataclasses.replace(numerics, quantizes_activations=False)
    recorder = TapRecorder(taps)
    context = step_context(rows, config, numerics)
    table_rows, cache = _engram_rows(weights, config, rows, cache)
    carry = _initial_carry(weights, config, rows, cache, numerics)
    middle = config.kv_source_layer_ids[-1]
    for start, stop in ((0, middle), (middle, config.num_hidden_layers)):
        carry = _run_layers(carry, weights, context, table_rows, recorder, (start, stop))
    collapsed = hyper.collapse(carry.streams, carry.pre_mix)
    hidden = rms_norm(collapsed, weights.norm, config.rms_norm_eps)
    tap = recorder.scoped("final.")
    for name, value in (("pre_mix", carry.pre_mix), ("collapsed", collapsed), ("normed", hidden)):
        tap(name, value)
    write_rings = jax.vmap(write_ring, in_axes=(0, 0, None))
    window = write_rings(carry.cache.window, carry.window_rows, rows)
    return hidden, recorder.result(), carry.cache.replace(window=window)


def head_logits(hidden: Array, weights: Weights) -> Array:
    """Project hidden states [..., D] to logits [..., V] in float32."""
    return linear_float32(hidden, weights.head)


def _engram_rows(weights: Weights, config: ModelConfig, rows: Rows, cache: Cache) -> tuple[Array, Cache]:
    """Hash every row's n-grams and keep the latest compressed ids."""
    compressed_ids = jnp.where(rows.is_image, NOTHING, weights.token_map[rows.token_ids])
    lookback = look_back(rows, config.engram_max_ngram_size)
    history = read_ring(cache.engram_ids, compressed_ids, rows, lookback)
    history = jnp.where(is_before_start(rows, config.engram_max_ngram_size), NOTHING, history)
    pad_id = weights.token_map[config.engram_pad_token_id]
    table_rows = hash_rows(history, config, pad_id)
    return table_rows, cache.replace(engram_ids=write_ring(cache.engram_ids, compressed_ids, rows))


def _initial_carry(
    weights: Weights, config: ModelConfig, rows: Rows, cache: Cache, numerics: Numerics
) -> Carry:
    num_rows = rows.token_ids.shape[0]
    embedded = weights.embed[rows.token_ids].astype(numerics.compute_dtype)
    streams, pre_mix = hyper.initial_streams(embedded, config.hc_mult)
    ratio = config.compress_ratios[config.candidate_source_layer_id]
    groups = cache.compressed[ratio].kv.shape[2]
    blocks = -(-groups // config.candidate_block_size)
    rows_shape = (config.num_hidden_layers, num_rows, config.head_dim)
    return Carry(
        streams=streams,
        pre_mix=pre_mix,
        cache=cache,
        window_rows=jnp.zeros(rows_shape, numerics.compute_dtype),
        selection=jnp.full((num_rows, config.index_topk), NOTHING, jnp.int32),
        is_candidate=jnp.zeros((num_rows, blocks), bool),
    )


def _run_layers(
    carry: Carry,
    weights: Weights,
    context: StepContext,
    table_rows: Array,
    recorder: TapRecorder,
    span: tuple[int, int],
) -> Carry:
    """Run the layers start..stop by segments; equal layers and repeated patterns are scanned."""
    config, layer = context.config, span[0]

    def step(carry: Carry, kind: LayerKind, index: LayerIndex, tap: Tap = no_tap) -> Carry:
        layer_weights = take_layer(weights.layers[kind.name], index.in_kind)
        return run_layer(carry, LayerCall(layer_weights, kind, index, context, tap))

    for segment in make_schedule(config, *span):
        if segment.runs[0].kind is None:
            place = config.engram_layer_ids.index(layer)
            tap = recorder.scoped(f"layers.{layer}.engram.")
            arguments = (carry.streams, table_rows[:, place], weights.engram[place], context.rows.is_image)
            carry = carry.replace(streams=engram(*arguments, config, context.numerics, tap))
            continue
        layers = range(layer, layer + segment.num_layers)
        if any(recorder.wants(f"layers.{number}.") for number in layers):
            for number in layers:
                tap = recorder.scoped(f"layers.{number}.")
                carry = step(carry, layer_kind(config, number), _layer_index(config, number), tap)
        else:
            carry = _scan_segment(carry, segment, layer, config, step)
        layer += segment.num_layers
    return carry


def _layer_index(config: ModelConfig, layer: int) -> LayerIndex:
    kind = layer_kind(config, layer)
    earlier = [source for source in sources_by_ratio(config).get(kind.ratio, ()) if source <= layer]
    in_kind = layers_by_kind(config)[kind].index(layer)
    return LayerIndex(layer=layer, in_kind=in_kind, source=max(len(earlier) - 1, 0))


type LayerStep = Callable[[Carry, LayerKind, LayerIndex], Carry]


def _scan_segment(carry: Carry, segment: Segment, layer: int, config: ModelConfig, step: LayerStep) -> Carry:
    """Scan a segment: the outer loop over repeats, inner loops over runs of equal layers.

    All indices are linear in the two loop counters, so they are computed, not stored.
    """
    depth = segment.num_layers // segment.repeats

    def sequence(carry: Carry, repeat: Array | int) -> Carry:
        offset = layer
        for run in segment.runs:
            first = _layer_index(config, offset)
            # Without a repeat there is no layer one period on, and the stride is multiplied by 0.
            later = _layer_index(config, offset + depth) if segment.repeats > 1 else first
            body = partial(_run_body, step, run.kind, first, later, repeat)
            carry = _loop(body, carry, run.length)
            offset += run.length
        return carry

    return _loop(sequence, carry, segment.repeats)


def _run_body(
    step: LayerStep,
    kind: LayerKind,
    first: LayerIndex,
    later: LayerIndex,
    repeat: Array | int,
    carry: Carry,
    place: Array | int,
) -> Carry:
    index = LayerIndex(
        layer=first.layer + repeat * (later.layer - first.layer) + place,
        in_kind=first.in_kind + repeat * (later.in_kind - first.in_kind) + place,
        source=first.source + repeat * (later.source - first.source),
    )
    return step(carry, kind, index)


def _loop(body: Callable[[Carry, Array | int], Carry], carry: Carry, count: int) -> Carry:
    """Apply `body(carry, i)` for i = 0..count-1, as a scan if there is more than one."""
    if count == 1:
        return body(carry, 0)
    counter = jnp.arange(count, dtype=jnp.int32)
    return lax.scan(lambda carry, place: (body(carry, place), None), carry, counter)[0]
