"""Plans and a compiled step with round numbers and no meaning, written by hand.

Separate because reports and the command line are tested without predicting or compiling anything.
Read next: `../sharding/layout_plan.py`.
"""

from __future__ import annotations

from ..sharding.compiled_step import CompiledStep
from ..sharding.layout import Layout
from ..sharding.layout_plan import Collective, DeviceSpec, LayoutPlan, MemoryLine, Part
from ..sharding.mesh import MeshShape
from ..sharding.presets import find_layout
from .presets import TINY

KIB = 1024
"""Bytes."""

KINDS = (
    ("weights", "routed experts", 480 * KIB, "experts"),
    ("weights", "Engram tables", 96 * KIB, "engram_rows"),
    ("weights", "attention", 64 * KIB, "heads"),
    ("cache", "window rings", 32 * KIB, "slots"),
    ("cache", "compressed pages", 256 * KIB, "slots"),
    ("activations", "prefill step", 48 * KIB, None),
)
"""Group, name, bytes of the whole, logical axis that divides it."""


def plan_of(
    mesh: str = "2x2", layout: str | Layout = "data+expert", memory: int = 512 * KIB, slots: int = 8
) -> LayoutPlan:
    """Make a plan.

    Args:
        mesh: the grid, as `MeshShape.parse` reads it.
        layout: a preset's name, or a layout.
        memory: bytes of each device.
        slots: sequences, over all devices.

    Returns:
        A plan that fits into 512 KiB if experts and slots are divided by four.
    """
    shape = MeshShape.parse(mesh)
    laid = find_layout(layout).on(shape)
    lines = []
    for group, name, size, word in KINDS:
        axes = laid.stored_axes_of(word) if word else ()
        divided = ((word, axes),) if word and axes else ()
        lines.append(MemoryLine(group, name, size // shape.size(axes), size, divided))
    over, devices = laid.axes_of("experts"), shape.size(laid.axes_of("experts"))
    collectives = (
        Collective("prefill", "expert dispatch", "all-to-all", over, devices, 4608, 20, 0.004),
        Collective("decode", "expert dispatch", "all-gather", over, devices, 288, 10, 0.0002),
        Collective("decode", "expert return", "reduce-scatter", over, devices, 2304, 10, 0.0003),
    )
    parts = (
        Part("prefill", "attention", 4e9, 3e6, 0.006, "compute"),
        Part("prefill", "routed experts", 2e9, 5e6, 0.004, "network"),
        Part("decode", "attention", 3e6, 2e5, 0.0010, "memory"),
        Part("decode", "routed experts", 2e6, 4e5, 0.0015, "memory"),
    )
    device = DeviceSpec("H200", memory, 4.8e12, 989e12, 450e9, 2e-5, 0.7, "written by hand")
    return LayoutPlan(
        config=TINY,
        mesh=shape,
        layout=laid,
        device=device,
        num_slots=slots,
        context=256,
        prefill_rows=512,
        memory=tuple(lines),
        collectives=collectives if over else (),
        parts=parts,
        max_slots=12,
        max_context=384,
        temporaries=(("prefill", "layers", 48 * KIB), ("decode", "head", 40 * KIB)),
    )


COMPILED = CompiledStep(
    step="decode",
    target="cpu",
    seconds_to_compile=12.3,
    argument_bytes=280 * KIB + 2,
    output_bytes=80 * KIB,
    alias_bytes=72 * KIB,
    temporary_bytes=50 * KIB,
    peak_bytes=336 * KIB,
    host_peak_bytes=3 * 2**30,
    collectives=(
        Collective("decode", "psum", "all-gather", ("data", "model"), 4, 288, 10),
        Collective("decode", "psum", "all-reduce", ("data",), 2, 64, 1),
    ),
)
"""A decode step of `plan_of()` in which one collective is missing and one is new."""
