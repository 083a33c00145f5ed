"""Plans, comparisons and sweeps of layouts: what they say, what they refuse, how fast they are."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from deepinfer_jax.arrays import spec_leaves
from deepinfer_jax.assets import RELEASED_FOLDER
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.lab import compare, plan, sweep
from deepinfer_jax.lab_model import model_sizes, weight_kind
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL
from deepinfer_jax.model.weights import weight_specs
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.sharding.layout_plan import LayoutPlan
from deepinfer_jax.sharding.mesh import MeshShape
from deepinfer_jax.sharding.presets import PRESETS
from deepinfer_jax.testing.presets import DIVISIBLE

EXPERT_BYTES = 18_800_640
"""One routed expert of the released checkpoint: spec/checkpoint.md section 4."""


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return read_config(RELEASED_FOLDER)


def bytes_by_name(plan: LayoutPlan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in plan.memory}


def test_the_released_model_on_64_devices_is_planned_in_under_two_seconds(released: ModelConfig) -> None:
    start = time.perf_counter()
    plan(released, "64", "data+expert", slots=4096, context=131072)
    assert time.perf_counter() - start < 2


def test_the_released_model_has_its_published_bytes(released: ModelConfig) -> None:
    found = plan(released, "1", "single", slots=1, context=131072)
    lines = {line.name: line.total_bytes for line in found.memory}
    assert lines["routed experts"] == 40 * 384 * EXPERT_BYTES
    assert lines["Engram tables"] == sum(released.engram_num_embeddings) * 264
    assert lines["embedding"] == lines["output head"] == 129280 * 5120 * 2
    # spec/serving.md section 2: bytes a token, bytes of a ring's row.
    assert lines["compressed KV"] == 131072 * 720
    assert lines["index keys"] == 131072 * 170
    assert lines["window rings"] == 40 * 128 * 528
    assert not found.fits


def test_experts_and_tables_are_shared_out(released: ModelConfig) -> None:
    found = plan(released, "64", "data+expert", slots=4096, context=131072)
    lines = bytes_by_name(found)
    assert lines["routed experts"] == 40 * 6 * EXPERT_BYTES
    # Filled up to equal shares.
    assert lines["Engram tables"] == sum(-(-rows // 64) for rows in released.engram_num_embeddings) * 264
    assert lines["compressed KV"] == 64 * 131072 * 720
    assert found.fits
    assert found.num_slots <= found.max_slots
    assert found.context <= found.max_context


def test_redundant_experts_take_memory(released: ModelConfig) -> None:
    options: dict[str, Any] = {"slots": 4096, "context": 131072}
    before = bytes_by_name(plan(released, "64", "data+expert", **options))
    after = bytes_by_name(plan(released, "64", "data+expert", **options, num_experts_redundant=64))
    assert after["routed experts"] - before["routed experts"] == 40 * EXPERT_BYTES
    assert after["expert tables"] > 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_planned(name: str) -> None:
    found = plan(DIVISIBLE, "2x4", name, slots=16, context=512, numerics=FLOAT32)
    assert found.layout == PRESETS[name].on(found.mesh)
    assert found.fits
    assert {part.step for part in found.parts} == {"prefill", "decode"}
    assert all(part.seconds >= 0 and part.bound in ("compute", "memory", "network") for part in found.parts)
    assert found.decode_rate > 0 and found.prefill_rate > 0
    assert bool(found.collectives) == (name not in ("single", "data"))


def test_a_mesh_may_be_written_in_any_way() -> None:
    forms = ["2x4", (2, 4), MeshShape.parse("2x4"), "data=2,model=4"]
    plans = [plan(DIVISIBLE, mesh, "expert", 8, 256) for mesh in forms]
    assert all(found == plans[0] for found in plans)


def test_arithmetic_changes_bytes() -> None:
    official, plain = (plan(DIVISIBLE, "8", "data", 8, 256, numerics=one) for one in (OFFICIAL, FLOAT32))
    assert plain.bytes_of("weights") > official.bytes_of("weights")
    assert plain.bytes_of("cache") > official.bytes_of("cache")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mesh": "7"}, ("experts", "numbers of devices that work: 1, 2, 4, 8, 16")),
        ({"layout": "date"}, ("layout: got 'date'", "data+expert")),
        ({"layout": Layout("mine", "", {"experts": "pod"})}, ("'experts' is divided over ['pod']", "data")),
        ({"slots": 12}, ("slots: got 12 over 8 devices", "take 16")),
        ({"slots": 0}, ("slots: got 0",)),
        ({"context": 0}, ("context: got 0, expected 1 to 1024",)),
        ({"context": 2048}, ("context: got 2048, expected 1 to 1024",)),
        ({"prefill_rows": 100}, ("prefill rows: got 100", "take 512")),
        ({"device": "H2000"}, ("device: got 'H2000'", "H200", "DeviceSpec(...)")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_is_refused(change: dict[str, Any], named: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"mesh": "8", "layout": "data+expert", "slots": 16, "context": 256} | change
    with pytest.raises(LayoutError) as caught:
        plan(DIVISIBLE, **options)
    for part in named:
        assert part in str(caught.value)


def test_plans_that_fit_come_first_then_the_fastest() -> None:
    options: dict[str, Any] = {"slots": 64, "context": 1024}
    plans = [plan(DIVISIBLE, "8", name, **options) for name in ("expert", "data+expert", "data")]
    small = replace(plans[2].device, memory_bytes=1)
    broken = plan(DIVISIBLE, "8", "data", **options, device=small)
    ranked = compare([broken, *plans])
    assert [one.fits for one in ranked] == [True, True, True, False]
    rates = [one.decode_rate for one in ranked[:3]]
    assert rates == sorted(rates, reverse=True)


def test_a_sweep_finds_the_best_that_fits_and_says_what_was_refused() -> None:
    found = sweep(DIVISIBLE, 8, 64, 1024)
    assert found[0] == compare(found)[0]
    assert len(found) == len(found.plans) > len(PRESETS)
    assert len({(one.layout.name, one.mesh) for one in found}) == len(found)
    assert all(one.fits and one.mesh.num_devices == 8 for one in found)
    assert all(one.reason and one.layout for one in found.refused)
    quickest = sweep(DIVISIBLE, 8, 64, 1024, objective="latency")
    assert quickest[0].seconds("decode") == min(one.seconds("decode") for one in found)


def test_a_sweep_of_one_device_has_the_one_layout() -> None:
    assert "single" in {one.layout.name for one in sweep(DIVISIBLE, 1, 8, 256)}


def test_a_sweep_refuses_what_no_layout_can_hold() -> None:
    with pytest.raises(LayoutError, match="objective: got 'speed', expected one of"):
        sweep(DIVISIBLE, 8, 64, 1024, objective="speed")
    with pytest.raises(LayoutError, match="slots: got 0"):
        sweep(DIVISIBLE, 8, 0, 1024)


def test_every_weight_has_a_kind(released: ModelConfig) -> None:
    kinds = {name: weight_kind(name) for name, _ in spec_leaves(weight_specs(released))}
    assert kinds["embed"] == "embedding"
    assert kinds["head"] == "output head"
    assert kinds["norm"] == "norms"
    assert kinds["engram.0.embed"] == "Engram tables"
    assert kinds["engram.1.q_weight"] == kinds["engram.1.wkv"] == "Engram projections"
    assert kinds["layers.window.attn.wkv"] == kinds["layers.window.attn.attn_sink"] == "attention"
    assert kinds["layers.full_2.attn.compressor.wkv"] == kinds["layers.full_2.attn.compressor.norm"]
    assert kinds["layers.full_2.attn.indexer.wk"] == "indexers"
    assert kinds["layers.full_2.ffn.bias_vl"] == "routers"


def test_the_planner_knows_all_bytes_of_the_state() -> None:
    sizes = model_sizes(DIVISIBLE, OFFICIAL)
    one, two = (sum(array.num_bytes for array in sizes.state_of(slots, 300)) for slots in (2, 4))
    # What does not grow with the slots: forbidden tokens, and two numbers of the schedule of drafts.
    whole = DIVISIBLE.vocab_size + 2 * 4
    assert two - whole == 2 * (one - whole)
