"""Which layer does what, and how equal layers are grouped into scans.

Separate because the order of layers is data derived from the configuration, with no arrays in it.
Read next: `weights.py` (stacks by kind), `backbone.py` (runs the schedule).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config import ModelConfig


class LayerKind(NamedTuple):
    """What distinguishes the arithmetic of one layer from another's.

    Attributes:
        role: "window" (no compressed KV), "full" (KV and index source), "reindex" (index source
            only) or "reuse" (neither).
        ratio: tokens per compressed group of the KV it reads, 0 for "window".
        candidates: "source" if it chooses the candidate blocks, "restricted" if its own selection
            stays inside them, "" otherwise.
    """

    role: str
    ratio: int
    candidates: str = ""

    @property
    def name(self) -> str:
        """Key of the kind's weight stack."""
        return "_".join(str(part) for part in self if part)

    @property
    def is_kv_source(self) -> bool:
        """Whether it owns a compressor and index keys."""
        return self.role == "full"

    @property
    def is_index_source(self) -> bool:
        """Whether it selects entries itself."""
        return self.role in ("full", "reindex")


class Run(NamedTuple):
    """`length` adjacent steps of one kind: a layer kind, or Engram (`kind` is None)."""

    kind: Any  # LayerKind or None
    length: int


class Segment(NamedTuple):
    """A sequence of runs, repeated: the unit that becomes one scan."""

    runs: tuple[Run, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """Steps over all repeats."""
        return self.repeats * sum(run.length for run in self.runs)


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Give the kind of a backbone layer.

    Source: spec/model.md section 1, layer roles.
    """
    ratio = config.compress_ratios[layer]
    if ratio == 0:
        return LayerKind("window", 0)
    candidate = config.candidate_source_layer_id
    if layer in config.kv_source_layer_ids:
        return LayerKind("full", ratio, "source" if layer == candidate else "")
    if layer in config.index_source_layer_ids:
        return LayerKind("reindex", ratio, "restricted" if layer > candidate else "")
    return LayerKind("reuse", ratio)


def layers_by_kind(config: ModelConfig) -> dict[LayerKind, tuple[int, ...]]:
    """List the layers of each kind in order, kinds in order of first occurrence."""
    found: dict[LayerKind, tuple[int, ...]] = {}
    for layer in range(config.num_hidden_layers):
        kind = layer_kind(config, layer)
        found[kind] = (*found.get(kind, ()), layer)
    return found


def sources_by_ratio(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """List the KV source layers of each compress ratio."""
    found: dict[int, tuple[int, ...]] = {}
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        found[ratio] = (*found.get(ratio, ()), layer)
    return found


def make_schedule(config: ModelConfig, start: int = 0, stop: int | None = None) -> tuple[Segment, ...]:
    """Group layers `start..stop` (Engram steps before their layer) into repeated sequences of runs.

    Equal adjacent steps become a run; a sequence of runs that recurs at once becomes one segment, so
    that what is compiled grows with the number of different patterns, not with the depth.

    Args:
        config: the architecture.
        start: first layer.
        stop: layer after the last one, all by default.

    Returns:
        The segments in order.
    """
    steps: list[LayerKind | None] = []
    for layer in range(start, config.num_hidden_layers if stop is None else stop):
        if layer in config.engram_layer_ids:
            steps.append(None)
        steps.append(layer_kind(config, layer))
    return _group(_run_lengths(steps))


def _run_lengths(steps: list[LayerKind | None]) -> list[Run]:
    runs: list[Run] = []
    for step in steps:
        if runs and runs[-1].kind == step:
            runs[-1] = Run(step, runs[-1].length + 1)
        else:
            runs.append(Run(step, 1))
    return runs


def _group(runs: list[Run]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    position = 0
    while position < len(runs):
        best = Segment((runs[position],), 1)
        for size in range(1, (len(runs) - position) // 2 + 1):
            pattern = runs[position : position + size]
            if any(run.kind is None for run in pattern):
                break  # Engram tables differ in size, so a scan cannot stack them.
            repeats = 1
            while runs[position + repeats * size : position + (repeats + 1) * size] == pattern:
                repeats += 1
            if repeats > 1 and repeats * size > len(best.runs) * best.repeats:
                best = Segment(tuple(pattern), repeats)
        segments.append(best)
        position += len(best.runs) * best.repeats
    return tuple(segments)
