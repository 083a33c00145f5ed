"""Time of each part of a step, as if every kernel were limited by arithmetic or by memory alone.

What is assumed: routing is uniform; slots are full while decoding, and prompts half read, on average, while
prefilling; every kernel reads what it needs once and writes what it makes once; all rows of a tile are
computed, padding included, and each tile reads the weights again; parts follow one another, collectives
hide behind nothing; a device reaches `DeviceSpec.efficiency` of its peaks.
Separate because these are estimates of time; `memory.py` and `collectives.py` count bytes.
Read next: `cost.py`, which puts everything together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .layout_plan import Collective, DeviceSpec, Part
from .memory import StoredArray
from .step_sizes import StepSizes

MULTIPLY_ADD = 2
"""Floating-point operations of one multiplication with addition."""

SAMPLING_READS = 8
"""Times that sampling reads or writes numbers of 4 bytes a token of the vocabulary: logits out and in, the
counts in and out, scores and noise."""


class Work(NamedTuple):
    """What a part of a step does on one device: operations, bytes of device memory."""

    flops: float
    num_bytes: float


def step_parts(sizes: StepSizes, device: DeviceSpec, collectives: Sequence[Collective]) -> tuple[Part, ...]:
    """Put the parts of a step on the roofline.

    seconds = max(flops / peak, bytes / bandwidth) / efficiency.

    Args:
        sizes: of the step.
        device: gives the peaks.
        collectives: of this step, with their times.

    Returns:
        The parts in the order of a layer, the collectives last.
    """
    parts = [_part(sizes, device, name, work(sizes)) for name, work in _PARTS.items()]
    if collectives:
        num_bytes = sum(one.calls * one.num_bytes for one in collectives)
        seconds = sum(one.seconds for one in collectives)
        parts.append(Part(sizes.step, "collectives", 0.0, num_bytes, seconds, "network"))
    return tuple(parts)


def _part(sizes: StepSizes, device: DeviceSpec, name: str, work: Work) -> Part:
    compute, memory = work.flops / device.flops, work.num_bytes / device.memory_bandwidth
    bound = "compute" if compute > memory else "memory"
    return Part(sizes.step, name, *work, max(compute, memory) / device.efficiency, bound)


def _tile_rows(sizes: StepSizes) -> int:
    """Rows that a device computes in the whole step, padding included."""
    return sizes.num_tiles * sizes.tile


def _named(sizes: StepSizes, *parts: str) -> list[StoredArray]:
    """List the weights whose name contains one of some words."""
    return [array for array in sizes.model.weights if any(part in array.name for part in parts)]


def _products(sizes: StepSizes, *parts: str) -> Work:
    """Matrix products of all rows with weights, which every tile reads again."""
    arrays = _named(sizes, *parts)
    flops = sum(MULTIPLY_ADD * _tile_rows(sizes) * _elements(sizes, array) for array in arrays)
    return Work(flops, sizes.num_tiles * sum(_bytes_of_use(sizes, array) for array in arrays))


def _bytes_of_use(sizes: StepSizes, array: StoredArray) -> int:
    """Bytes that one use of a weight moves: read, and written before if it was put together."""
    is_gathered = any(sizes.layout.gathered_axes_of(word) for word in array.words)
    return sizes.work_bytes(array) * (1 + is_gathered)


def _elements(sizes: StepSizes, array: StoredArray) -> int:
    """Weights in a matrix of one number each; scales, norms and biases take no part in products."""
    is_matrix = len(array.shape) > 1 and not array.name.endswith(".scales")
    return sizes.work_bytes(array) // array.itemsize if is_matrix else 0


def _attention_projections(sizes: StepSizes) -> Work:
    names = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    return _products(sizes, *(f".attn.{name}" for name in names), ".attn.compressor.")


def _sparse_attention(sizes: StepSizes) -> Work:
    config, model = sizes.model.config, sizes.model
    heads = config.num_attention_heads // sizes.share("heads")
    window = min(config.sliding_window, sizes.context)
    flops = num_bytes = 0.0
    for layer in model.layers:
        entries = min(config.index_topk, _groups(sizes, layer.ratio)) if layer.ratio else 0
        # Scores and the weighted sum.
        flops += 2 * MULTIPLY_ADD * _tile_rows(sizes) * heads * config.head_dim * (window + entries)
        num_bytes += sizes.rows_here * (window * model.window_bytes + entries * model.entry_bytes)
    heads_io = 2 * heads * config.head_dim * model.compute_bytes
    return Work(flops, num_bytes + len(model.layers) * sizes.rows_here * heads_io)


def _groups(sizes: StepSizes, ratio: int) -> float:
    """Groups that a row sees: of a full slot while decoding, of a half on average in a prompt."""
    return sizes.context / ratio / (2 if sizes.is_prefill else 1)


def _indexer(sizes: StepSizes) -> Work:
    config, model = sizes.model.config, sizes.model
    flops, num_bytes = _products(sizes, ".attn.indexer.")
    sources = [layer for layer in model.layers if layer.is_index_source]
    groups = sum(_groups(sizes, layer.ratio) for layer in sources)
    flops += MULTIPLY_ADD * sizes.rows_here * groups * config.index_n_heads * config.index_head_dim
    readers = sizes.rows_here / (model.block_rows if sizes.is_prefill else 1)
    # Keys of each slot; the scores go out and in again.
    num_bytes += readers * groups * model.key_bytes + 2 * 4 * sizes.rows_here * groups
    return Work(flops, num_bytes)


def touched_experts(sizes: StepSizes) -> float:
    """Expect how many different experts a device reads for one tile.

    held (1 - (1 - K / E)^rows), rows = all that meet at this device's experts.

    Args:
        sizes: of the step.

    Returns:
        Experts of one layer.
    """
    config = sizes.model.config
    rows = sizes.valid_rows * sizes.count(sizes.common("experts"))
    is_missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows
    return config.n_routed_experts / sizes.share("experts") * (1 - is_missed)


def _routed_experts(sizes: StepSizes) -> Work:
    """The experts that rows chose, and the router; all experts are written if they are put together."""
    config, model = sizes.model.config, sizes.model
    layers, stored = len(model.layers), _named(sizes, ".ffn.experts.")
    held = sizes.work_shape(stored[0])[1]
    layer_bytes = sum(sizes.work_bytes(array) for array in stored) / layers
    written = sum(_bytes_of_use(sizes, array) for array in stored) / layers - layer_bytes
    weights = layers * sizes.num_tiles * (touched_experts(sizes) / held * layer_bytes + written)
    channels = 3 * config.hidden_size * config.moe_intermediate_size / sizes.share("ffn")
    met = sizes.rows_here * sizes.count(sizes.common("experts"))
    pairs = met * config.num_experts_per_tok / sizes.share("experts")
    rows = 2 * layers * pairs * config.hidden_size * model.compute_bytes
    router = _products(sizes, ".ffn.gate")
    return Work(MULTIPLY_ADD * layers * pairs * channels + router.flops, weights + rows + router.num_bytes)


def _shared_expert(sizes: StepSizes) -> Work:
    return _products(sizes, ".ffn.shared_experts.")


def _hyper_connections(sizes: StepSizes) -> Work:
    """Each site reads the streams to mix, reads them to collapse, and reads and writes them at its end."""
    config, model = sizes.model.config, sizes.model
    flops, num_bytes = _products(sizes, ".hc_attn.", ".hc_ffn.")
    streams = config.hc_mult * config.hidden_size * model.compute_bytes
    return Work(flops, num_bytes + 2 * len(model.layers) * 4 * _tile_rows(sizes) * streams)


def _engram(sizes: StepSizes) -> Work:
    config = sizes.model.config
    places = range(len(config.engram_layer_ids))
    flops, num_bytes = _products(sizes, *(f"engram.{place}.wkv" for place in places))
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    tables = [array for place in places for array in _named(sizes, f"engram.{place}.embed")]
    gathered = sum(columns * array.shape[-1] * array.itemsize for array in tables)
    return Work(flops, num_bytes + sizes.rows_here * gathered)


def _head(sizes: StepSizes) -> Work:
    """Logits of the last rows, in tiles, and the token of each slot."""
    config, model = sizes.model.config, sizes.model
    rows = sizes.slots_here * sizes.count(sizes.common("vocab"))
    tile = model.row_tile or rows
    tiles = -(-rows // tile)
    head = next(array for array in model.weights if array.name == "head")
    flops = MULTIPLY_ADD * tiles * tile * _elements(sizes, head)
    num_bytes = tiles * sizes.work_bytes(head)
    return Work(flops, num_bytes + SAMPLING_READS * 4 * sizes.slots_here * config.vocab_size)


_PARTS: dict[str, Callable[[StepSizes], Work]] = {
    "attention projections": _attention_projections,
    "sparse attention": _sparse_attention,
    "indexer": _indexer,
    "routed experts": _routed_experts,
    "shared expert": _shared_expert,
    "hyper-connections": _hyper_connections,
    "Engram": _engram,
    "head and sampling": _head,
}
