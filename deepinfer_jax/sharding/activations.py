"""Memory that lives only inside a step, predicted for the reference path as XLA compiles it.

At any moment a step holds what crosses its layers and what the operation of the moment makes. The moments
that can need the most are written down here, each as the arrays that are alive in it, as read from XLA's
buffer assignments. A fused kernel needs less.
Separate because it is the one estimate among the bytes: the rest of a device's memory is exact.
Read next: `step_sizes.py`; `memory.py` for what lives longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import PAGE_TOKENS
from .exchange_plan import expert_exchange
from .memory import StoredArray, bytes_on_device
from .step_sizes import StepSizes

XLA_CPU_OPTIONS = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
}
"""Compiler options under which XLA's CPU backend uses memory as its GPU backend does.

By default it trades memory for threads: it decodes the weights of many layers at once, and before a loop
over tiles those of all layers, which then are temporaries (measured: 36 MB instead of 13 MB).
"""

WIDE = 4
"""Bytes of a float32, an int32 or a word."""

SAMPLING_ARRAYS = 6
"""Arrays of float32 [slots, vocabulary] that sampling holds at once, a mask of bytes included."""

RINGS = "cache.window"
"""Name of the window rings among the arrays of the state."""


@dataclass(frozen=True, slots=True)
class WeightValues:
    """Bytes that weights take up while they are used, on one device.

    Args:
        queries: the projection of the queries as numbers, 0 if it is stored so; and as it is stored if it was
            put together for this use. The same for the next two.
        output: the larger projection of the attention's output.
        engram: the projection of an Engram layer.
        expert: the three matrices of a routed expert as numbers; packed ones are decoded where they lie.
        gathered_experts: the experts of a layer, put together; 0 if their work is divided or they are whole.
    """

    queries: int
    output: int
    engram: int
    expert: int
    gathered_experts: int


def weight_values(sizes: StepSizes) -> WeightValues:
    """Find what weights take up while they are used: the same for any slots and context.

    Args:
        sizes: of any step.

    Returns:
        The bytes.
    """
    first = sizes.model.layers[0].stack
    experts = [array for array in _named(sizes, f"layers.{first}.ffn.experts.")]
    held = sizes.work_shape(experts[0])[1]
    layer = [sizes.work_bytes(array) // array.shape[0] for array in experts]
    is_gathered = any(_is_gathered(sizes, array) for array in experts)
    decoded = 3 * _as_numbers(sizes, f"layers.{first}.ffn.experts.w1")
    return WeightValues(
        queries=_in_use(sizes, ".attn.wq_b."),
        output=max(_in_use(sizes, ".attn.wo_a."), _in_use(sizes, ".attn.wo_b.")),
        engram=_in_use(sizes, "engram.0.wkv."),
        expert=decoded or sum(layer) // held,
        gathered_experts=sum(layer) * is_gathered,
    )


def activation_peak(sizes: StepSizes, values: WeightValues) -> tuple[str, int]:
    """Find the moment of a step that needs the most memory.

    Args:
        sizes: of the step.
        values: of `weight_values`.

    Returns:
        The moment's name, and the bytes of all temporaries that are alive in it.
    """
    return max(activation_moments(sizes, values).items(), key=lambda item: item[1])


def activation_moments(sizes: StepSizes, values: WeightValues) -> dict[str, int]:
    """Predict the temporaries of each moment that can need the most.

    Args:
        sizes: of the step.
        values: of `weight_values`.

    Returns:
        Bytes by name of the moment.
    """
    around, kept, selected = _around_layers(sizes), _results(sizes), _selected(sizes)
    return {
        "index scores": around + _index_scores(sizes),
        "queries": around + selected + _queries(sizes, values),
        "attention": around + selected + _attention(sizes),
        "attention output": around + values.output + _attention_output(sizes),
        "routed experts": around + values.expert + values.gathered_experts + _expert_work(sizes),
        "Engram": around + values.engram + _engram(sizes),
        "head": kept + _head(sizes),
        "sampling": kept + _sampling(sizes),
    }


def _around_layers(sizes: StepSizes) -> int:
    """What every layer has around it: streams, its input, window rows, pending halves, expert outputs."""
    config, model = sizes.model.config, sizes.model
    streams = config.hc_mult * config.hidden_size * WIDE
    inputs = config.hidden_size * model.compute_bytes
    windows = len(model.layers) * model.window_bytes * sizes.count(sizes.layout.sequence_axes)
    halves = 2 * config.head_dim * WIDE * any(layer.ratio == 2 for layer in model.layers)
    return sizes.tile * (streams + inputs + windows + halves) + _expert_outputs(sizes) + _results(sizes)


def _results(sizes: StepSizes) -> int:
    """Hidden states of all tiles, kept until the last one ran."""
    rows = sizes.num_tiles * sizes.tile if sizes.num_tiles > 1 else 0
    return rows * sizes.model.config.hidden_size * sizes.model.compute_bytes


def _scores(sizes: StepSizes) -> int:
    """Index scores of a tile: all groups that a slot can have."""
    return sizes.tile * sizes.pages * _entries(sizes) * WIDE


def _entries(sizes: StepSizes) -> int:
    """Index keys of a page, of the finest source."""
    ratios = [layer.ratio for layer in sizes.model.layers if layer.is_index_source]
    return PAGE_TOKENS // min(ratios) if ratios else 0


def _index_scores(sizes: StepSizes) -> int:
    """Keys of some pages, queries repeated for each, their products; the scores before and after."""
    config, entries = sizes.model.config, _entries(sizes)
    pairs = sizes.tile * min(sizes.model.pages_at_once, sizes.pages)
    products = pairs * config.index_n_heads * entries * WIDE
    operands = pairs * (entries + config.index_n_heads) * config.index_head_dim * sizes.model.compute_bytes
    return 2 * _scores(sizes) + products + max(operands, products)


def _selected(sizes: StepSizes) -> int:
    """Keys that a tile attends to, as numbers, the selected ones twice; index scores of two sources."""
    config = sizes.model.config
    keys = sizes.tile * (config.sliding_window + 2 * config.index_topk) * config.head_dim
    return keys * sizes.model.compute_bytes + 2 * _scores(sizes)


def _heads(sizes: StepSizes) -> int:
    return sizes.model.config.num_attention_heads // sizes.share("heads")


def _queries(sizes: StepSizes, values: WeightValues) -> int:
    """The weights of the queries, and these in float32; or the packed window rows, gathered twice."""
    queries = sizes.tile * _heads(sizes) * sizes.model.config.head_dim * WIDE
    packed = 2 * sizes.tile * sizes.model.config.sliding_window * sizes.model.window_bytes
    return max(values.queries + queries, packed)


def _attention(sizes: StepSizes) -> int:
    """Queries, and the scores of all heads before and after."""
    config = sizes.model.config
    scores = 2 * (config.sliding_window + config.index_topk) * WIDE
    return sizes.tile * _heads(sizes) * (scores + config.head_dim * sizes.model.compute_bytes)


def _attention_output(sizes: StepSizes) -> int:
    """The output of the heads and its projection; index scores of two sources."""
    config = sizes.model.config
    heads = _heads(sizes) * config.head_dim * sizes.model.compute_bytes
    return sizes.tile * (heads + config.hidden_size * WIDE) + 2 * _scores(sizes)


def _expert_rows(sizes: StepSizes) -> tuple[int, int]:
    """Rows that meet at the experts of a device, and outputs for each."""
    choices = sizes.model.config.num_experts_per_tok
    if not sizes.layout.axes_of("experts"):
        return sizes.tile, choices
    num_devices = sizes.count(sizes.common("experts"))
    plan = expert_exchange(sizes.valid_rows, choices, num_devices)
    if plan.is_gathered or num_devices == 1:
        return num_devices * sizes.valid_rows, choices
    return num_devices * plan.capacity, 1


def _expert_outputs(sizes: StepSizes) -> int:
    """Outputs of the experts of a device, before anything is added to their zeros."""
    rows, choices = _expert_rows(sizes)
    return rows * choices * sizes.model.config.hidden_size * sizes.model.compute_bytes


def _expert_work(sizes: StepSizes) -> int:
    """An expert's three inner results, outputs; streams once more, selected entries, index scores; and what
    arrived from other devices and goes back there."""
    config, wide = sizes.model.config, sizes.model.compute_bytes
    rows, _ = _expert_rows(sizes)
    is_divided = bool(sizes.layout.axes_of("experts"))
    channels = config.moe_intermediate_size // sizes.share("ffn")
    inner = (sizes.tile if is_divided else rows) * channels * (2 * WIDE + wide)
    streams = sizes.tile * config.hc_mult * config.hidden_size * wide
    selected = sizes.tile * config.index_topk * config.head_dim * wide + 2 * _scores(sizes)
    travelling = (_expert_outputs(sizes) + rows * config.hidden_size * wide) * is_divided
    return inner + _expert_outputs(sizes) + streams + selected + travelling


def _engram(sizes: StepSizes) -> int:
    """The result of the projection; streams once more."""
    config = sizes.model.config
    streams = config.hc_mult * config.hidden_size * sizes.model.compute_bytes
    return sizes.tile * ((config.hc_mult + 1) * config.hidden_size * WIDE + streams)


def _head(sizes: StepSizes) -> int:
    """Logits of all tiles, and once more those of the last of several, or of the rows that are there."""
    tile = sizes.model.row_tile or sizes.slots_here
    rows = sizes.slots_here * sizes.count(sizes.common("vocab"))
    tiles = -(-rows // tile)
    again = tile if tiles > 1 else rows % tile
    columns = sizes.model.config.vocab_size // sizes.share("vocab")
    return (tiles * tile + again) * columns * WIDE


def _sampling(sizes: StepSizes) -> int:
    """Logits, what one tile of slots makes of them, and the rings that the only tile of rows wrote."""
    tile = sizes.model.sampling_tile or sizes.slots_here
    rings = 0
    if sizes.num_tiles == 1:
        state = sizes.model.state_of(sizes.num_slots, sizes.context)
        rings = bytes_on_device([array for array in state if array.name == RINGS], sizes.layout, sizes.mesh)
    slots = sizes.slots_here + SAMPLING_ARRAYS * tile
    return rings + slots * sizes.model.config.vocab_size * WIDE


def _named(sizes: StepSizes, part: str) -> Iterator[StoredArray]:
    return (array for array in sizes.model.weights if part in array.name)


def _in_use(sizes: StepSizes, part: str) -> int:
    """Bytes of a quantised matrix as numbers, and once more as bytes if it was put together."""
    found = [array for array in _named(sizes, part) if _is_gathered(sizes, array)]
    layers = [array.shape[0] if "layers" in array.words else 1 for array in found]
    joined = max((sizes.work_bytes(array) // n for array, n in zip(found, layers, strict=True)), default=0)
    return _as_numbers(sizes, part) + joined


def _as_numbers(sizes: StepSizes, part: str) -> int:
    """Bytes of a quantised matrix as numbers, the largest of those named so; 0 if it is stored as numbers."""
    payloads = [array for array in _named(sizes, part) if array.name.endswith(".payload")]
    # Two numbers of four bits are a byte.
    packed = 2 if ".experts." in part else 1
    counts = [packed * math.prod(sizes.work_shape(array)[-2:]) for array in payloads]
    return max(counts, default=0) * sizes.model.compute_bytes


def _is_gathered(sizes: StepSizes, array: StoredArray) -> bool:
    return any(sizes.layout.gathered_axes_of(word) for word in array.words)
