"""Every collective of a step, predicted from sizes alone.

Separate because it mirrors `exchange.py` and `expert_exchange.py` line by line: each line there that
sends something has its line here, and tests hold both to the compiled program.
Read next: `exchange.py`; `roofline.py`, which adds the times up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .exchange_plan import expert_exchange
from .layout_plan import Collective, DeviceSpec
from .memory import StoredArray
from .step_sizes import StepSizes

WORD = 4
"""Bytes of a word, of an index and of a float32."""


class Sent(NamedTuple):
    """One collective: what for, its kind, over which mesh axes, bytes of the operand, calls in a step."""

    part: str
    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    calls: int


def step_collectives(sizes: StepSizes, device: DeviceSpec) -> tuple[Collective, ...]:
    """List the collectives of a step.

    Args:
        sizes: of the step.
        device: gives their time.

    Returns:
        One entry for each part, kind, axes and size; a round of expert dispatch is counted once.
    """
    calls: Counter[Sent] = Counter()
    for sent in _all_sent(sizes):
        calls[sent._replace(calls=0)] += sent.calls
    found = []
    for sent, count in calls.items():
        num_devices = sizes.count(sent.axes)
        one = Collective(*(sizes.step, sent.part, sent.kind, sent.axes, num_devices, sent.num_bytes, count))
        found.append(replace(one, seconds=count * collective_seconds(one, device)))
    return tuple(found)


def collective_seconds(collective: Collective, device: DeviceSpec) -> float:
    """Predict the time of one call: a latency, and the bytes that a device sends in a ring over its links.

    All-gather sends the operand to each of the n - 1 others; reduce-scatter and all-to-all send (n - 1) / n
    of it, all-reduce twice that.

    Args:
        collective: the collective.
        device: gives latency and bandwidth.

    Returns:
        Seconds.

    Source: fits the two-GPU table of spec/platform.md section 8 within 20 % from 64 MB on.
    """
    others = collective.num_devices - 1
    share = {"all-gather": others, "all-reduce": 2 * others / collective.num_devices}
    sent = share.get(collective.kind, others / collective.num_devices) * collective.num_bytes
    return device.link_latency + sent / (device.link_bandwidth * device.efficiency)


def _all_sent(sizes: StepSizes) -> Iterator[Sent]:
    yield from _embedding(sizes)
    yield from _engram(sizes)
    yield from _experts(sizes)
    yield from _sums(sizes)
    yield from _weights(sizes)
    yield from _sequence(sizes)
    yield from _head(sizes)


def _words(sizes: StepSizes) -> int:
    """Bytes of a row of hidden channels, as words."""
    return _whole_words(sizes.model.config.hidden_size * sizes.model.compute_bytes)


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD) * WORD


def _embedding(sizes: StepSizes) -> Iterator[Sent]:
    yield from _table_rows(sizes, "embedding", "vocab", 1, _words(sizes), sizes.num_tiles)


def _engram(sizes: StepSizes) -> Iterator[Sent]:
    config = sizes.model.config
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    for place in range(len(config.engram_layer_ids)):
        stored = [array for array in sizes.model.weights if array.name.startswith(f"engram.{place}.embed")]
        row = _whole_words(sum(array.shape[-1] * array.itemsize for array in stored))
        yield from _table_rows(sizes, "Engram rows", "engram_rows", columns, row, sizes.num_tiles)


def _table_rows(
    sizes: StepSizes, part: str, word: str, columns: int, row_bytes: int, calls: int
) -> Iterator[Sent]:
    """Rows of a divided table: indices to the holders, bytes back; see `exchange.bring_rows`."""
    common, rest, rows = sizes.common(word), sizes.rest(word), sizes.valid_rows
    if common:
        yield Sent(part, "all-gather", common, rows * columns * WORD, calls)
        yield Sent(part, "reduce-scatter", common, sizes.count(common) * rows * columns * row_bytes, calls)
    if rest:
        yield Sent(part, "all-reduce", rest, rows * columns * row_bytes, calls)


def _experts(sizes: StepSizes) -> Iterator[Sent]:
    """Rows to their experts and outputs back; see `expert_exchange.exchange_experts`."""
    common, rest, rows = sizes.common("experts"), sizes.rest("experts"), sizes.valid_rows
    choices, words = sizes.model.config.num_experts_per_tok, _words(sizes)
    calls = sizes.num_tiles * len(sizes.model.layers)
    there, back = "expert dispatch", "expert outputs"
    plan = expert_exchange(rows, choices, sizes.count(common))
    if common and plan.is_gathered:
        yield Sent(there, "all-gather", common, rows * (words + 2 * choices * WORD), calls)
        yield Sent(back, "reduce-scatter", common, plan.num_devices * rows * choices * words, calls)
    elif common:
        pairs = plan.num_devices * plan.capacity
        yield Sent("expert rounds", "all-reduce", common, WORD, calls)
        yield Sent(there, "all-to-all", common, pairs * (words + 2 * WORD), calls)
        yield Sent(back, "all-to-all", common, pairs * words, calls)
    if rest:
        yield Sent(back, "all-reduce", rest, rows * choices * words, calls)


def _sums(sizes: StepSizes) -> Iterator[Sent]:
    """Parts of divided contractions, added in float32; see `exchange.sum_parts`."""
    num_bytes = sizes.valid_rows * sizes.model.config.hidden_size * WORD
    calls = sizes.num_tiles * len(sizes.model.layers)
    for part, word in (("attention output", "heads"), ("expert channels", "ffn")):
        if axes := sizes.layout.axes_of(word):
            yield Sent(part, "all-reduce", axes, num_bytes, calls)


def _weights(sizes: StepSizes) -> Iterator[Sent]:
    """Weights whose storage alone is divided, a layer at a time; see `exchange.put_together`."""
    if not sizes.layout.gathered:
        return
    for array in sizes.model.weights:
        if not array.name.startswith(("layers.", "engram.")):
            continue
        is_stacked = "layers" in array.words
        calls = sizes.num_tiles * (array.shape[0] if is_stacked else 1)
        # Dimension after dimension: what one all-gather joined is the operand of the next.
        whole = set[int]()
        for dimension, word in enumerate(array.words):
            axes = sizes.layout.gathered_axes_of(word)
            if axes:
                yield Sent("weights", "all-gather", axes, _slice_bytes(array, sizes, whole), calls)
            whole.add(dimension)


def _slice_bytes(array: StoredArray, sizes: StepSizes, whole: set[int]) -> int:
    """Bytes of one layer of an array on a device, some dimensions already put together."""
    stored, worked = array.shape_on(sizes.layout, sizes.mesh), sizes.work_shape(array)
    found = [worked[i] if i in whole else stored[i] for i in range(len(stored))]
    return math.prod(found[1:] if "layers" in array.words else found) * array.itemsize


def _sequence(sizes: StepSizes) -> Iterator[Sent]:
    """What devices that share a sequence tell each other; see `exchange.all_gather` in the layers."""
    axes, rows, model = sizes.layout.sequence_axes, sizes.tile, sizes.model
    if not axes:
        return
    tiles = sizes.num_tiles
    yield Sent("window rows", "all-gather", axes, rows * model.window_bytes, tiles * len(model.layers))
    sources = [layer for layer in model.layers if layer.is_kv_source]
    pairs = sum(layer.ratio == 2 for layer in sources)
    if pairs:
        yield Sent(
            "pending halves", "all-gather", axes, rows * model.config.head_dim * WORD, tiles * 2 * pairs
        )
    if sources:
        yield Sent("compressed KV", "all-gather", axes, rows * model.entry_bytes, tiles * len(sources))
        yield Sent("index keys", "all-gather", axes, rows * model.key_bytes, tiles * len(sources))
    yield Sent("last rows", "all-reduce", axes, sizes.slots_here * _words(sizes), 1)


def _head(sizes: StepSizes) -> Iterator[Sent]:
    """Logits of a divided vocabulary; see `exchange.bring_columns`."""
    own, rest = sizes.common("vocab"), sizes.rest("vocab")
    config, slots = sizes.model.config, sizes.slots_here
    columns = config.vocab_size // sizes.share("vocab")
    if own:
        yield Sent(*("head", "all-gather", own, slots * config.hidden_size * sizes.model.compute_bytes, 1))
        yield Sent("head", "all-to-all", own, sizes.count(own) * slots * columns * WORD, 1)
    if rest:
        yield Sent("head", "all-gather", rest, slots * columns * sizes.count(own) * WORD, 1)
