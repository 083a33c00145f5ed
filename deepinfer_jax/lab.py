"""The layout lab: what a layout would cost on devices that need not exist, before any weight does.

Separate because it joins the model, which `sharding/` does not know, with what is predicted there.
Read next: `lab_model.py` (the model's sizes), `sharding/cost.py` (the prediction), `lab_compile.py` (the
compiler's own numbers), `sharding/report/` (how a plan is shown).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .config import ModelConfig
from .lab_model import model_sizes
from .lab_shapes import StepShape
from .model.numerics import OFFICIAL, Numerics
from .model.weights import check_layout
from .sharding.cost import Request, predict
from .sharding.devices import find_device
from .sharding.errors import LayoutError
from .sharding.layout import Layout
from .sharding.layout_plan import DeviceSpec, LayoutPlan
from .sharding.mesh import MeshShape
from .sharding.presets import PRESETS, find_layout

OBJECTIVES = ("throughput", "latency")
"""What a sweep can look for: the most tokens a second, or the shortest decode step."""


def plan(
    config: ModelConfig,
    mesh: str | Sequence[int] | MeshShape,
    layout: str | Layout,
    slots: int,
    context: int,
    device: str | DeviceSpec = "H200",
    *,
    numerics: Numerics = OFFICIAL,
    prefill_rows: int | None = None,
    num_experts_redundant: int = 0,
) -> LayoutPlan:
    """Predict memory, collectives and time of a layout, from shapes alone.

    Args:
        config: the architecture.
        mesh: the grid of devices: 8, 2x4, sizes, or a shape.
        layout: a preset's name or a layout.
        slots: sequences, over all devices.
        context: tokens that each slot can hold, prompt and answer together; whole pages are kept.
        device: a name of `sharding.devices.DEVICES`, or a device.
        numerics: the choice of arithmetic.
        prefill_rows: prompt rows of a prefill step, over all devices; a full step on each by default.
        num_experts_redundant: places for further copies of routed experts.

    Returns:
        The plan, whether it fits or not.

    Raises:
        LayoutError: a layout that cannot hold the model, or slots, rows or context that cannot be.
    """
    grid, chip = MeshShape.parse(mesh), find_device(device)
    chosen = find_layout(layout).on(grid)
    check_layout(config, chosen, grid, num_experts_redundant)
    if not 1 <= context <= config.max_position_embeddings:
        raise LayoutError(
            f"context: got {context}, expected 1 to {config.max_position_embeddings}, the positions that the "
            "model knows; choose a number in between"
        )
    shape = StepShape(config, grid, chosen, slots, context, "prefill", prefill_rows, numerics)
    shape.check()
    sizes = model_sizes(config, numerics, num_experts_redundant)
    return predict(sizes, Request(chosen, grid, slots, context, shape.num_rows, chip))


def compare(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Rank plans: those that fit first, then by tokens a second while decoding.

    Args:
        plans: any number.

    Returns:
        The plans, the best first.
    """
    return sorted(plans, key=lambda one: (not one.fits, -one.decode_rate))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layout that a sweep left out.

    Args:
        layout: its name.
        mesh: the grid it was tried on.
        reason: why it cannot be.
    """

    layout: str
    mesh: MeshShape
    reason: str


@dataclass(frozen=True)
class Sweep(Sequence[LayoutPlan]):
    """Plans of a sweep, the best first, as a sequence.

    Args:
        plans: those that fit; all of them if none does.
        refused: what cannot be, and why.
    """

    plans: tuple[LayoutPlan, ...]
    refused: tuple[Refusal, ...]

    def __getitem__(self, index: Any) -> Any:
        """Give a plan, or a slice of them."""
        return self.plans[index]

    def __len__(self) -> int:
        """Count the plans."""
        return len(self.plans)


def sweep(
    config: ModelConfig,
    num_devices: int,
    slots: int,
    context: int,
    device: str | DeviceSpec = "H200",
    objective: str = "throughput",
    **options: Any,
) -> Sweep:
    """Try every preset on every grid of one or two axes.

    On a grid of two axes, two presets are crossed: one along each. A preset along both would be the same as
    along one long axis.

    Args:
        config: the architecture.
        num_devices: of the grid.
        slots: sequences, over all devices.
        context: tokens that each slot can hold.
        device: as in `plan`.
        objective: "throughput" or "latency".
        options: further ones of `plan`.

    Returns:
        The plans that fit, the best first, and what was refused.

    Raises:
        LayoutError: an unknown objective, or if every layout was refused.
    """
    if objective not in OBJECTIVES:
        raise LayoutError(
            f"objective: got {objective!r}, expected one of {list(OBJECTIVES)}; choose one of them"
        )
    plans, refused = [], []
    for grid, layout in _candidates(num_devices):
        try:
            plans.append(plan(config, grid, layout, slots, context, device, **options))
        except LayoutError as error:
            refused.append(Refusal(layout.name, grid, str(error)))
    if not plans:
        raise LayoutError(refused[0].reason)
    fitting = [one for one in plans if one.fits] or plans
    if objective == "latency":
        ranked = sorted(fitting, key=lambda one: one.seconds("decode"))
    else:
        ranked = compare(fitting)
    return Sweep(tuple(ranked), tuple(refused))


def _candidates(num_devices: int) -> Iterator[tuple[MeshShape, Layout]]:
    """Every preset along one axis, then every two of them along an axis each."""
    names = [name for name in PRESETS if name != "single"]
    line = MeshShape.parse(str(num_devices))
    yield from ((line, PRESETS[name].on(line)) for name in (names if num_devices > 1 else PRESETS))
    for first in range(2, num_devices // 2 + 1):
        if num_devices % first:
            continue
        grid = MeshShape.parse((first, num_devices // first))
        for number, name in enumerate(names):
            for other in names[number + 1 :]:
                if (layout := _crossed(PRESETS[name], PRESETS[other], grid)) is not None:
                    yield grid, layout


def _crossed(outer: Layout, inner: Layout, grid: MeshShape) -> Layout | None:
    """Lay one preset along the first axis of a grid and another along the second; None if they contradict."""
    names = grid.names
    split: dict[str, tuple[str, ...]] = {}
    gathered: dict[str, tuple[str, ...]] = {}
    for preset, axis in zip((outer, inner), names, strict=True):
        for table, words in ((split, preset.split), (gathered, preset.gathered)):
            for word in dict(words):
                table[word] = (*table.get(word, ()), axis)
    if "rows" in split:
        split["rows"] = tuple(dict.fromkeys((*split.get("slots", ()), *split["rows"])))
    if split.keys() & gathered.keys():
        return None
    name = f"{outer.name} x {inner.name}"
    return Layout(name, f"{outer.name} along {names[0]}, {inner.name} along {names[1]}", split, gathered)
