"""Steps compiled from shapes alone: their arguments, processes of their own, refusals."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import replace
from typing import Any

import jax
import pytest

from deepinfer_jax import lab_compile
from deepinfer_jax.config import CacheConfig, DraftConfig, ModelConfig
from deepinfer_jax.lab_compile import AOT_PACKAGES, compile_step
from deepinfer_jax.model.abstract_weights import abstract_weights
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.sharding.compiled_step import CompiledStep
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.gpu_targets import GPU_TARGETS, topology
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.sharding.mesh import MeshShape
from deepinfer_jax.sharding.presets import find_layout
from deepinfer_jax.step import initial_state
from deepinfer_jax.testing.presets import SMALLEST, random_resident_weights, random_weights

CONFIG = replace(SMALLEST, is_quantized=True, n_routed_experts=8, draft=DraftConfig())
SLOTS, CONTEXT = 16, 256


def compiled(mesh: str, layout: str | Layout, **options: Any) -> CompiledStep:
    shape = MeshShape.parse(mesh)
    return compile_step(CONFIG, shape, find_layout(layout), SLOTS, CONTEXT, **options)


def tree_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_bytes(config: ModelConfig, slots: int) -> int:
    sizes = CacheConfig.for_slots(slots, CONTEXT)
    options: Any = {"config": config, "sizes": sizes, "numerics": OFFICIAL}
    is_forbidden = jax.ShapeDtypeStruct((config.vocab_size,), bool)
    return tree_bytes(jax.eval_shape(lambda flags: initial_state(flags, **options), is_forbidden))


@pytest.mark.parametrize("numerics", [OFFICIAL, FLOAT32], ids=lambda numerics: numerics.name)
@pytest.mark.parametrize("is_quantized", [True, False], ids=["quantized", "plain"])
def test_abstract_weights_are_those_that_are_drawn(is_quantized: bool, numerics: Numerics) -> None:
    config = replace(SMALLEST, is_quantized=is_quantized)
    key, abstract = jax.random.key(0), abstract_weights(config, numerics)
    if is_quantized:
        drawn = jax.eval_shape(lambda key: random_resident_weights(config, key, numerics.compute_dtype), key)
    else:
        drawn = random_weights(config, key, numerics.compute_dtype)
    assert jax.tree.structure(abstract) == jax.tree.structure(drawn)
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (abstract, drawn)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_one_device_is_given_weights_and_state() -> None:
    found = compiled("1", "single")
    state = state_bytes(CONFIG, SLOTS)
    assert found.argument_bytes == tree_bytes(abstract_weights(CONFIG, OFFICIAL)) + state + SLOTS
    # Every part of the state but the row of forbidden tokens is written in place.
    assert 0 <= state - found.alias_bytes <= CONFIG.vocab_size
    assert found.peak_bytes >= found.argument_bytes + found.temporary_bytes
    assert found.collectives == ()
    assert (found.step, found.target) == ("decode", "cpu")


@pytest.mark.multi
@pytest.mark.slow
def test_a_mesh_shares_slots_and_finds_the_exchange() -> None:
    found = compiled("2x4", "data+expert")
    assert found.alias_bytes >= state_bytes(CONFIG, SLOTS // 8) - CONFIG.vocab_size
    assert {one.kind for one in found.collectives} == {"all-gather", "reduce-scatter"}
    assert {one.axes for one in found.collectives} == {("data", "model")}


@pytest.mark.slow
def test_more_devices_than_this_process_has_get_a_process_of_their_own() -> None:
    found = compiled("16", "data", step="prefill")
    assert found.step == "prefill"
    assert found.alias_bytes >= state_bytes(CONFIG, 1) - CONFIG.vocab_size


def test_a_refusal_crosses_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sixteen slots on nine devices: with the check taken out, found only when the other process lowers.
    monkeypatch.setattr(lab_compile.StepShape, "check", lambda shape: None)
    with pytest.raises(ValueError, match="16"):
        compiled("9", "data")


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_compile, "_environment", lambda *_: {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."})
    monkeypatch.setattr(lab_compile, "__name__", "deepinfer_jax.no_such_module")
    with pytest.raises(RuntimeError, match=r"exit code 1.*No module named"):
        compiled("16", "data")


def test_the_environment_of_a_process_has_its_devices() -> None:
    current = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_other=1", "HOME": "here"}
    changed = lab_compile._environment(current, 64, "cpu")
    assert changed["XLA_FLAGS"] == "--xla_other=1 --xla_force_host_platform_device_count=64"
    assert changed["HOME"] == "here"
    assert lab_compile._environment(current, 64, "b200")["XLA_FLAGS"] == "--xla_other=1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"step": "encode"}, "got step 'encode'", id="step"),
        pytest.param({"target": "tpu"}, "expected one of .*b200", id="target"),
        pytest.param({"prefill_rows": 100}, "prefill rows: got 100 .*multiple of 512.*take 512", id="rows"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        compiled("8", "data", **options)


def test_slots_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(LayoutError, match="slots: got 12 over 8 devices, expected a multiple of 8; take 16"):
        compile_step(CONFIG, MeshShape.parse("8"), find_layout("data"), 12, CONTEXT)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        pytest.param({}, "got no jax-cuda13-plugin, no jax-cuda13-pjrt", id="missing"),
        pytest.param(dict.fromkeys(AOT_PACKAGES, "0.1"), "got jax-cuda13-plugin 0.1", id="other_version"),
    ],
)
def test_missing_packages_are_named(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "jaxlib":
            return "0.11.2"
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=message) as error:
        compiled("8", "data", target="b200")
    assert "deepinfer-jax[aot]" in str(error.value)


def test_gpu_descriptions() -> None:
    text = GPU_TARGETS["b200"].description()
    assert "cuda_compute_capability { major: 10 minor: 0 }" in text
    assert "core_count: 148" in text
    assert [topology(count) for count in (1, 4, 8, 64, 12)] == ["1x1x1", "1x1x4", "1x1x8", "1x8x8", "1x1x12"]


@pytest.mark.slow
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_gpu_that_is_not_there(target: str) -> None:
    try:
        lab_compile.require_aot_packages()
    except ValueError as error:
        pytest.skip(str(error))
    found = compiled("2x4", "data+expert", target=target)
    on_cpu = compiled("2x4", "data+expert")
    assert found.argument_bytes == on_cpu.argument_bytes
    assert found.alias_bytes == on_cpu.alias_bytes
    assert set(found.collectives) == set(on_cpu.collectives)
