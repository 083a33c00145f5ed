"""The layers in order: equal ones stacked and scanned, Engram between them.

Separate from `backbone.py` because it is control flow and indices only.
Read next: `step_layer.py` (the body of the scans), `schedule.py` (the order).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..arithmetic import scan_counted
from ..arrays import Array
from ..config import ModelConfig
from ..sharding.exchange import put_together
from .engram import engram
from .schedule import LayerKind, Segment, layer_kind, layers_by_kind, make_schedule, sources_by_ratio
from .step_layer import Carry, LayerCall, LayerIndex, StepContext, run_layer
from .taps import Tap, TapRecorder, no_tap
from .weights import Weights, engram_words, layer_words, take_layer


def run_layers(
    carry: Carry,
    weights: Weights,
    context: StepContext,
    table_rows: Array,
    recorder: TapRecorder,
    span: tuple[int, int],
) -> Carry:
    """Run the layers start..stop by segments; equal layers and repeated patterns are scanned.

    Args:
        carry: state that crosses layers.
        weights: the loaded weights.
        context: what the step's layers share.
        table_rows: int32 [R, Engram layers, C].
        recorder: of the values asked for; a segment of layers with one is not scanned.
        span: first layer and the one after the last.

    Returns:
        The carry after the layers.
    """
    config, layer = context.config, span[0]

    def call(carry: Carry, kind: LayerKind, index: LayerIndex, tap: Tap = no_tap) -> Carry:
        layer_weights = take_layer(weights.layers[kind.name], index.in_kind)
        layer_weights = put_together(layer_weights, layer_words(config, kind), context.placement.layout)
        return run_layer(carry, LayerCall(layer_weights, kind, index, context, tap))

    for segment in make_schedule(config, *span):
        if segment.runs[0].kind is None:
            place = config.engram_layer_ids.index(layer)
            tap = recorder.scoped(f"layers.{layer}.engram.")
            layout = context.placement.layout
            engram_weights = put_together(weights.engram[place], engram_words(config, place), layout)
            arguments = (carry.streams, table_rows[:, place], engram_weights)
            is_image = context.roles.is_image
            arguments = (*arguments, is_image, config, context.numerics, tap, context.placement)
            streams = engram(*arguments)
            carry = carry.replace(streams=streams)
            continue
        layers = range(layer, layer + segment.num_layers)
        if any(recorder.wants(f"layers.{number}.") for number in layers):
            for number in layers:
                tap = recorder.scoped(f"layers.{number}.")
                carry = call(carry, layer_kind(config, number), layer_index(config, number), tap)
        else:
            carry = _scan_segment(carry, segment, layer, config, call)
        layer += segment.num_layers
    return carry


def layer_index(config: ModelConfig, layer: int) -> LayerIndex:
    """Give the places of a layer: among all, in its kind's stack, and of its KV source."""
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
            first = layer_index(config, offset)
            # Without a repeat there is no layer one period on, and the stride is multiplied by 0.
            later = layer_index(config, offset + depth) if segment.repeats > 1 else first
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
    return scan_counted(lambda carry, place: (body(carry, place), None), carry, count)[0]
