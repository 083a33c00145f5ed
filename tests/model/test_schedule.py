"""Kinds of layers and their grouping into scans."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.schedule import (
    LayerKind,
    layer_kind,
    layers_by_kind,
    make_schedule,
    sources_by_ratio,
)
from deepinfer_jax.testing.presets import SMALLEST, TINY, released_pattern

WINDOW = LayerKind("window", 0)
FULL_2, REUSE_2 = LayerKind("full", 2), LayerKind("reuse", 2)
FULL_1, REUSE_1 = LayerKind("full", 1, "source"), LayerKind("reuse", 1)
REINDEX = LayerKind("reindex", 1, "restricted")


@pytest.fixture(scope="module")
def released(released_folder: Path) -> ModelConfig:
    return read_config(released_folder)


def unrolled(config: ModelConfig) -> list[LayerKind | None]:
    return [
        run.kind
        for segment in make_schedule(config)
        for _ in range(segment.repeats)
        for run in segment.runs
        for _ in range(run.length)
    ]


def num_bodies(config: ModelConfig) -> int:
    """Layer and Engram bodies that are compiled: one for each run of each half."""
    middle = config.kv_source_layer_ids[-1]
    halves = (*make_schedule(config, 0, middle), *make_schedule(config, middle))
    return sum(len(segment.runs) for segment in halves)


def test_released_roles(released) -> None:
    kinds = [layer_kind(released, layer) for layer in range(released.num_hidden_layers)]
    encoder = [WINDOW, WINDOW, *[FULL_2, *[REUSE_2] * 5] * 3]
    decoder = [FULL_1, *[REUSE_1] * 3, *[REINDEX, *[REUSE_1] * 3] * 4]
    assert kinds == encoder + decoder


def test_released_schedule_has_12_bodies(released) -> None:
    assert num_bodies(released) == 12


def test_equal_layers_add_no_body() -> None:
    assert num_bodies(released_pattern(extra_repeats=5)) == num_bodies(released_pattern())


def test_pattern_preset_is_the_released_pattern(released) -> None:
    assert make_schedule(released_pattern()) == make_schedule(released)


@pytest.mark.parametrize("size", ["smallest", "tiny", "released"])
def test_schedule_keeps_the_order(released, size: str) -> None:
    config = {"smallest": SMALLEST, "tiny": TINY, "released": released}[size]
    expected: list[LayerKind | None] = []
    for layer in range(config.num_hidden_layers):
        expected += [None] * (layer in config.engram_layer_ids) + [layer_kind(config, layer)]
    assert unrolled(config) == expected


@pytest.mark.parametrize("split", range(11))
def test_halves_of_a_schedule_are_the_schedule(split: int) -> None:
    kinds = []
    for start, stop in ((0, split), (split, 10)):
        for segment in make_schedule(TINY, start, stop):
            kinds += [run.kind for run in segment.runs for _ in range(run.length)] * segment.repeats
    assert kinds == unrolled(TINY)


def test_layers_by_kind_cover_every_layer_once(released) -> None:
    members = sorted(layer for layers in layers_by_kind(released).values() for layer in layers)
    assert members == list(range(released.num_hidden_layers))


def test_sources_by_ratio(released) -> None:
    assert sources_by_ratio(released) == {2: (2, 8, 14), 1: (20,)}


def test_names_of_weight_stacks_differ(released) -> None:
    names = [kind.name for kind in layers_by_kind(released)]
    assert len(set(names)) == len(names)
