"""What a layout costs: memory, collectives and time of both steps, and the most that would fit.

Separate because it only puts together what the files beside it predict.
Read next: `step_sizes.py`, `memory.py`, `activations.py`, `collectives.py`, `roofline.py`; `../lab.py`, which
describes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import PAGE_TOKENS
from .activations import activation_peak, weight_values
from .collectives import step_collectives
from .layout import Layout
from .layout_plan import STEPS, DeviceSpec, LayoutPlan, MemoryLine
from .memory import bytes_on_device, memory_lines
from .mesh import MeshShape
from .roofline import step_parts
from .step_sizes import ModelSizes, StepSizes, num_pages

ROW_BYTES = 13
"""Of a row of a prefill plan: token, slot and position as int32, one byte that says whether it is there."""

SLOT_BYTES = {"prefill": 4, "decode": 1}
"""Of a slot, among a step's inputs: the row where its prompt ends, or whether it is active."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned.

    Args:
        layout: on the mesh, checked.
        mesh: the grid.
        num_slots: sequences, over all devices.
        context: tokens that each slot can hold.
        prefill_rows: prompt rows of a prefill step, over all devices.
        device: what each place of the grid is.
    """

    layout: Layout
    mesh: MeshShape
    num_slots: int
    context: int
    prefill_rows: int
    device: DeviceSpec


def predict(model: ModelSizes, request: Request) -> LayoutPlan:
    """Predict everything of one layout.

    Args:
        model: the model's sizes.
        request: what is planned.

    Returns:
        The plan.
    """
    steps = [_sizes(model, request, step, request.num_slots, request.context) for step in STEPS]
    collectives = [step_collectives(sizes, request.device) for sizes in steps]
    parts = [step_parts(sizes, request.device, sent) for sizes, sent in zip(steps, collectives, strict=True)]
    values = weight_values(steps[0])
    temporaries = tuple((sizes.step, *activation_peak(sizes, values)) for sizes in steps)
    return LayoutPlan(
        config=model.config,
        mesh=request.mesh,
        layout=request.layout,
        device=request.device,
        num_slots=request.num_slots,
        context=request.context,
        prefill_rows=request.prefill_rows,
        memory=_memory(model, request, temporaries),
        collectives=tuple(one for step in collectives for one in step),
        parts=tuple(one for step in parts for one in step),
        max_slots=_max_slots(model, request),
        max_context=_max_context(model, request),
        temporaries=temporaries,
    )


def input_bytes(plan: LayoutPlan, step: str) -> int:
    """Bytes on each device that a step is given besides weights and state."""
    slots = plan.num_slots // plan.mesh.size(plan.layout.axes_of("slots"))
    rows = plan.prefill_rows // plan.mesh.size(plan.layout.axes_of("slots")) if step == "prefill" else 0
    return rows * ROW_BYTES + slots * SLOT_BYTES[step]


def _sizes(model: ModelSizes, request: Request, step: str, num_slots: int, context: int) -> StepSizes:
    is_prefill = step == "prefill"
    layout = request.layout if is_prefill else request.layout.while_decoding
    rows = request.prefill_rows if is_prefill else num_slots
    return StepSizes(step, model, layout, request.mesh, num_slots, context, rows)


def _memory(
    model: ModelSizes, request: Request, temporaries: Sequence[tuple[str, str, int]]
) -> tuple[MemoryLine, ...]:
    arrays = (*model.weights, *model.state_of(request.num_slots, request.context))
    step, moment, peak = max(temporaries, key=lambda found: found[2])
    line = MemoryLine("activations", f"{step}: {moment}", peak, peak * request.mesh.num_devices)
    return (*memory_lines(arrays, request.layout, request.mesh), line)


def _max_slots(model: ModelSizes, request: Request) -> int:
    fits, shares = _fits(model, request), request.mesh.size(request.layout.axes_of("slots"))
    return shares * _largest(lambda count: fits(count * shares, num_pages(request.context)))


def _max_context(model: ModelSizes, request: Request) -> int:
    fits = _fits(model, request)
    limit = num_pages(model.config.max_position_embeddings)
    return PAGE_TOKENS * _largest(lambda pages: pages <= limit and fits(request.num_slots, pages))


def _fits(model: ModelSizes, request: Request) -> Callable[[int, int], bool]:
    """Make the test whether some slots of some pages each fit."""
    layout, mesh = request.layout, request.mesh
    values = weight_values(_sizes(model, request, STEPS[0], request.num_slots, request.context))
    free = request.device.memory_bytes - bytes_on_device(model.weights, layout, mesh)
    shares = mesh.size(layout.axes_of("slots"))

    def measured(slots: int, pages: int) -> int:
        return bytes_on_device(model.state_of(slots * shares, pages * PAGE_TOKENS), layout, mesh)

    # The state grows evenly: by so much a page, by so much a slot of one page.
    smallest = measured(1, 1)
    by_page, by_slot = measured(1, 2) - smallest, measured(2, 1) - smallest

    def fits(num_slots: int, pages: int) -> bool:
        slots = num_slots // shares
        state = smallest + (slots - 1) * by_slot + slots * (pages - 1) * by_page
        steps = (_sizes(model, request, step, num_slots, pages * PAGE_TOKENS) for step in STEPS)
        return state + max(activation_peak(sizes, values)[1] for sizes in steps) <= free

    return fits


def _largest(holds: Callable[[int], bool]) -> int:
    """Find the largest number for which a condition holds that fails for all larger ones; 0 for none."""
    too_large = 1
    while holds(too_large):
        too_large *= 2
    low, high = too_large // 2, too_large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
