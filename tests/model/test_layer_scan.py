"""Layers run in order and with their own indices, whatever is scanned; numbers are in other files.

The loops run in Python here and nothing is compiled. `test_gradients.py` compares scanned layers with
the same ones unrolled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model import layer_scan
from deepinfer_jax.model.schedule import layer_kind, layers_by_kind, sources_by_ratio
from deepinfer_jax.model.taps import TapRecorder
from deepinfer_jax.sharding.exchange import WHOLE
from deepinfer_jax.testing.presets import ONE_OF_EACH, SMALLEST, TINY, released_pattern

CONFIGS: dict[str, Callable[[Path], ModelConfig]] = {
    "smallest": lambda _: SMALLEST,
    "tiny": lambda _: TINY,
    "one_of_each": lambda _: ONE_OF_EACH,
    "released": read_config,
    "one_repeat_more": lambda _: released_pattern(1),
    "nano": lambda _: read_config(NANO_FOLDER),
}
each_config = pytest.mark.parametrize("name", CONFIGS)


class Carry(SimpleNamespace):
    """Stands for the state that crosses layers: the list of what ran."""

    def replace(self, streams: list[Any]) -> Carry:
        return Carry(streams=streams)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a span of layers with bodies that only record: kinds with indices, "engram" with its place."""

    def run_layer(carry: Carry, call: Any) -> Carry:
        return Carry(streams=[*carry.streams, (call.kind, tuple(call.place), call.weights)])

    def engram(streams: list[Any], _rows: Any, weights: Any, *_: Any) -> list[Any]:
        return [*streams, ("engram", weights)]

    def loop(body: Callable[[Any, int], Any], carry: Any, count: int) -> Any:
        lengths.append(count)
        for place in range(count):
            carry = body(carry, place)
        return carry

    lengths: list[int] = []
    monkeypatch.setattr(layer_scan, "_loop", loop)
    monkeypatch.setattr(layer_scan, "run_layer", run_layer)
    monkeypatch.setattr(layer_scan, "take_layer", lambda stack, index: (stack, index))
    monkeypatch.setattr(layer_scan, "engram", engram)

    def run(config: ModelConfig, span: tuple[int, int], taps: frozenset[str] = frozenset()) -> list[Any]:
        lengths.clear()
        stacks = defaultdict(str, {kind.name: kind.name for kind in layers_by_kind(config)})
        weights = SimpleNamespace(layers=stacks, engram=range(len(config.engram_layer_ids)))
        roles = SimpleNamespace(is_image=None)
        context = SimpleNamespace(placement=WHOLE, config=config, numerics=None, roles=roles)
        table_rows = defaultdict(lambda: None)
        arguments = Carry(streams=[]), weights, context, table_rows, TapRecorder(taps), span
        return layer_scan.run_layers(*arguments).streams  # pyright: ignore[reportArgumentType]

    run.lengths = lengths  # type: ignore[attr-defined]
    return run


def expected_visits(config: ModelConfig, span: tuple[int, int]) -> list[Any]:
    """Every layer of the span in turn, its Engram in front."""
    members, found = layers_by_kind(config), []
    for layer in range(*span):
        if layer in config.engram_layer_ids:
            found.append(("engram", config.engram_layer_ids.index(layer)))
        kind = layer_kind(config, layer)
        in_kind = members[kind].index(layer)
        sources = [source for source in sources_by_ratio(config).get(kind.ratio, ()) if source <= layer]
        index = layer_scan.LayerIndex(layer=layer, in_kind=in_kind, source=max(len(sources) - 1, 0))
        found.append((kind, tuple(index), (kind.name, in_kind)))
    return found


@each_config
@pytest.mark.parametrize("half", ["encoder", "decoder", "all"])
def test_layers_run_in_order_with_their_own_indices(
    visits: Callable[..., list[Any]], released_folder: Path, name: str, half: str
) -> None:
    config = CONFIGS[name](released_folder)
    middle, end = config.kv_source_layer_ids[-1], config.num_hidden_layers
    span = {"encoder": (0, middle), "decoder": (middle, end), "all": (0, end)}[half]
    assert visits(config, span) == expected_visits(config, span)


def test_the_released_model_has_loops_in_loops(visits: Any, released_folder: Path) -> None:
    """So that the test above is about scans: 5 and 3 equal layers, patterns of 6 and 4 twice and 4 times."""
    visits(read_config(released_folder), (0, 40))
    assert {2, 3, 4, 5} <= set(visits.lengths)


def test_a_tap_unrolls_its_segment_only(visits: Any) -> None:
    config = released_pattern()
    scanned = visits(config, (20, 40))
    assert max(visits.lengths) == 4
    assert visits(config, (20, 40), frozenset({"layers.22.out"})) == scanned
    assert max(visits.lengths) == 3
