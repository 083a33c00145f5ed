"""Predictions held to the compiler's own numbers, and to what was measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.lab import plan
from deepinfer_jax.lab_model import model_sizes
from deepinfer_jax.lab_shapes import StepShape, lower_step
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.sharding.activations import XLA_CPU_OPTIONS
from deepinfer_jax.sharding.collectives import collective_seconds
from deepinfer_jax.sharding.cost import input_bytes
from deepinfer_jax.sharding.devices import DEVICES, find_device
from deepinfer_jax.sharding.hlo import read_collectives
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.sharding.layout_plan import Collective, LayoutPlan
from deepinfer_jax.sharding.roofline import touched_experts
from deepinfer_jax.sharding.step_sizes import StepSizes
from deepinfer_jax.testing.presets import DIVISIBLE

QUANTIZED = replace(DIVISIBLE, is_quantized=True)
MIXED = Layout(
    "mixed",
    "slots along one axis, heads along the other",
    {"slots": "data", "heads": "model", "experts": "*", "vocab": "*", "engram_rows": "model"},
)


@dataclass(frozen=True)
class Case:
    """A layout, a mesh and a shape; what needs the most memory differs from case to case."""

    mesh: str
    layout: str | Layout
    slots: int
    context: int
    step: str = "decode"
    prefill_rows: int | None = None
    config: ModelConfig = QUANTIZED
    numerics: Numerics = OFFICIAL


def wider(**changes: Any) -> ModelConfig:
    return replace(QUANTIZED, **changes)


CASES = {
    "single": Case("1", "single", 8, 512),
    "data": Case("8", "data", 64, 1024),
    "expert": Case("2x4", "expert", 8, 256, config=wider(moe_intermediate_size=2048, index_n_heads=2)),
    "data_and_expert": Case("8", "data+expert", 64, 512),
    "data_and_expert_two_tiles": Case("2", "data+expert", 256, 256, config=wider(vocab_size=8192)),
    "data_and_expert_prefill": Case("2x4", "data+expert", 16, 256, "prefill"),
    "tensor": Case("8", "tensor", 8, 512, config=wider(sliding_window=128)),
    "tensor_prefill": Case("4", "tensor", 8, 256, "prefill", 128),
    "weights_only": Case("2x4", "weights-only", 8, 256, config=wider(moe_intermediate_size=1024)),
    "sequence_prefill": Case("8", "sequence", 8, 512, "prefill"),
    "sequence_decode": Case("8", "sequence", 8, 256, config=wider(hidden_size=512, index_n_heads=2)),
    "mixed_plain": Case("2x4", MIXED, 16, 256, config=DIVISIBLE, numerics=FLOAT32),
}

IN_FULL = {"data", "tensor_prefill", "sequence_decode", "data_and_expert_two_tiles"}
"""Cases that add the least: each takes seconds to compile."""


def compiled(case: Case) -> Any:
    """Compile a case's step for the simulated devices, scheduled for memory."""
    planned = plan_of(case)
    shape = StepShape(
        *(case.config, planned.mesh, planned.layout, case.slots, case.context, case.step),
        *(case.prefill_rows, case.numerics),
    )
    devices = jax.devices()[: planned.mesh.num_devices]
    # Memory is assigned before LLVM runs, whose work would only take time here.
    options = {**XLA_CPU_OPTIONS, "xla_backend_optimization_level": 0}
    return lower_step(shape, devices).compile(compiler_options=options)


def plan_of(case: Case) -> LayoutPlan:
    return plan(
        *(case.config, case.mesh, case.layout, case.slots, case.context),
        numerics=case.numerics,
        prefill_rows=case.prefill_rows,
    )


def calls_of(collectives: Any) -> Counter[Any]:
    """Count calls by kind, axes and bytes: parts with equal operands are told apart by name alone."""
    calls: Counter[Any] = Counter()
    for one in collectives:
        calls[one.kind, one.axes, one.num_bytes] += one.calls
    return calls


@pytest.mark.slow
@pytest.mark.usefixtures("without_compilation_cache")
def test_bc15_indexer_memory_is_bounded_by_a_tile_and_in_the_estimate() -> None:
    """Temporaries grow with the context, as scores of a tile's rows do, and not with the rows of a prompt."""
    for context in (1024, 4096, 16384):
        config = wider(max_position_embeddings=16384)
        case = Case("1", "single", 1, context, "prefill", 256, config=config)
        memory = compiled(case).memory_analysis()
        one_tile = compiled(replace(case, prefill_rows=64)).memory_analysis()
        # Four tiles of rows leave their hidden states behind, but share the memory of their scores.
        hidden = 256 * 4 * config.hidden_size
        assert memory.temp_size_in_bytes < one_tile.temp_size_in_bytes + 3 * hidden
        planned = plan_of(case)
        given = planned.bytes_of("weights") + planned.bytes_of("cache") + input_bytes(planned, "prefill")
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        assert given + step_peak(case) >= 0.9 * peak


@pytest.mark.multi
@pytest.mark.usefixtures("without_compilation_cache")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_FULL)) for name in CASES]
)
def test_the_prediction_is_what_xla_says(name: str) -> None:
    case = CASES[name]
    planned, program = plan_of(case), compiled(case)
    memory = program.memory_analysis()
    given = planned.bytes_of("weights") + planned.bytes_of("cache") + input_bytes(planned, case.step)
    assert given == memory.argument_size_in_bytes
    temporary = step_peak(case)
    assert temporary == pytest.approx(memory.temp_size_in_bytes, rel=0.25)
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert given + temporary == pytest.approx(peak, rel=0.1)
    sent = [one for one in planned.collectives if one.step == case.step]
    if planned.mesh.num_devices > 1:
        assert calls_of(sent) == calls_of(read_collectives(program.as_text(), planned.mesh))
    else:
        assert not sent


def step_peak(case: Case) -> int:
    """Temporaries of the case's own step, which a plan shows only if they are the larger ones."""
    return {step: peak for step, _, peak in plan_of(case).temporaries}[case.step]


def test_inputs_are_counted_with_the_arguments() -> None:
    planned = plan_of(CASES["data_and_expert_prefill"])
    assert input_bytes(planned, "decode") == 2
    assert input_bytes(planned, "prefill") == 256 * 13 + 2 * 4


@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", ["data", "data+expert", "expert"])
def test_the_most_that_fits_fits_and_no_more(name: str, mesh: str) -> None:
    whole = plan(QUANTIZED, mesh, name, 64, 512)
    device = replace(find_device("H200"), memory_bytes=whole.bytes_of() * 3 // 2)

    def fits(slots: int, context: int) -> bool:
        return plan(QUANTIZED, mesh, name, slots, context, device).fits

    found = plan(QUANTIZED, mesh, name, 64, 512, device)
    step = 1 if name == "expert" else 8
    assert found.max_slots > 64
    assert fits(found.max_slots, 512) and not fits(found.max_slots + step, 512)
    assert found.max_context == 1024 or not fits(64, found.max_context + 128)
    assert fits(64, found.max_context)


def test_nothing_fits_into_no_memory() -> None:
    device = replace(find_device("H200"), memory_bytes=1000)
    found = plan(QUANTIZED, "8", "data", 64, 512, device)
    assert found.max_slots == found.max_context == 0
    assert not found.fits


@pytest.mark.parametrize(
    ("kind", "microseconds"),
    [("all-reduce", 2020), ("all-gather", 2088), ("all-to-all", 956), ("reduce-scatter", 1146)],
)
def test_large_collectives_take_what_was_measured(kind: str, microseconds: float) -> None:
    """512 MB on each of two H200s: spec/platform.md section 8."""
    one = Collective("decode", "", kind, ("data",), 2, 512 * 10**6, 1)
    assert collective_seconds(one, DEVICES["H200"]) == pytest.approx(microseconds * 1e-6, rel=0.25)


def sizes_of(layout: str, mesh: str, slots: int) -> StepSizes:
    planned = plan(QUANTIZED, mesh, layout, slots, 256)
    sizes = model_sizes(QUANTIZED, OFFICIAL)
    return StepSizes("decode", sizes, planned.layout, planned.mesh, slots, 256, slots)


def test_experts_touched_are_those_that_rows_can_choose() -> None:
    one = touched_experts(sizes_of("single", "1", 1))
    assert one == pytest.approx(QUANTIZED.num_experts_per_tok)
    assert touched_experts(sizes_of("single", "1", 64)) == pytest.approx(QUANTIZED.n_routed_experts, rel=1e-4)
    # All rows meet where experts are divided over the devices that rows are.
    together, alone = sizes_of("data+expert", "8", 64), sizes_of("data", "8", 64)
    assert touched_experts(together) == pytest.approx(QUANTIZED.n_routed_experts / 8, rel=1e-3)
    assert touched_experts(alone) < QUANTIZED.n_routed_experts


def test_a_divided_part_does_less_work() -> None:
    whole, divided = (plan(QUANTIZED, mesh, "tensor", 8, 256) for mesh in ("1", "8"))
    for name in ("attention projections", "routed experts", "shared expert", "sparse attention"):
        before, after = (
            next(part for part in one.parts if part.step == "decode" and part.name == name)
            for one in (whole, divided)
        )
        assert after.flops < before.flops
        assert after.num_bytes < before.num_bytes


def test_devices_say_where_their_numbers_come_from() -> None:
    for name, device in DEVICES.items():
        assert find_device(name) is device and find_device(device) is device
        assert device.source
