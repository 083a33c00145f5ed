"""The tables of a report as plain values: titles, columns, cells, notes.

Separate because text and HTML show the same cells.
Read next: `compiled_sheets.py` (the compiler's numbers), `text.py`, `page.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_letters

from ..layout_plan import STEPS, LayoutPlan, MemoryLine
from .shares import shares_of
from .words import (
    BOUND_MEANINGS,
    KIND_MEANINGS,
    count_text,
    division_text,
    rate_text,
    share_text,
    size_text,
    step_seconds,
    time_text,
)

FREE_KEY = "."
"""Stands in the bar for memory that stays free."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        name: above it.
        is_number: whether its cells are numbers.
        can_go: whether a narrow page may leave it out.
    """

    name: str
    is_number: bool = False
    can_go: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table.

    Args:
        title: above it.
        columns: from left to right.
        rows: of cells, one for each column.
        notes: lines below it.
        has_total: whether the last row sums up the others.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    has_total: bool = False


def words(*names: str) -> list[Column]:
    """Give columns of words."""
    return [Column(name) for name in names]


def numbers(*names: str, can_go: bool = False) -> list[Column]:
    """Give columns of numbers."""
    return [Column(name, is_number=True, can_go=can_go) for name in names]


def memory_keys(plan: LayoutPlan) -> tuple[str, ...]:
    """Give each memory line the letter that stands for it in the bar."""
    return tuple(ascii_letters[i % len(ascii_letters)] for i in range(len(plan.memory)))


def memory_sheet(plan: LayoutPlan) -> Sheet:
    """Table what one device holds, by kind."""
    memory = plan.device.memory_bytes
    rows = []
    for key, line in zip(memory_keys(plan), plan.memory, strict=True):
        held = size_text(line.num_bytes), share_text(line.num_bytes, memory)
        rows.append((key, line.group, line.name, *held, *_origin(plan, line)))
    left = abs(plan.headroom)
    state = "free" if plan.fits else "too much"
    rows.append((FREE_KEY, state, "", size_text(left), share_text(left, memory), "", ""))
    rows.append(("", "device", plan.device.name, size_text(memory), "100%", "", ""))
    columns = (
        *words("", "group", "what"),
        *numbers("each device"),
        *numbers("of it", "whole", can_go=True),
        *words("divided"),
    )
    notes = ("whole: all of it, counted once. Devices that hold the same hold copies.",)
    return Sheet("Memory of each device", columns, tuple(rows), notes, has_total=True)


def _origin(plan: LayoutPlan, line: MemoryLine) -> tuple[str, str]:
    """Say how large an array is as a whole, and how it is divided."""
    if line.group == "activations" and not line.divided:
        return "", "each device its own"
    return size_text(line.total_bytes), division_text(line.divided, plan.mesh)


def division_sheet(plan: LayoutPlan) -> Sheet:
    """Table how each logical axis is divided."""
    rows = []
    for share in shares_of(plan):
        size = f"{share.size:,}" if share.size else ""
        each = f"{-(-share.size // share.num_parts):,}" if share.size else ""
        how = "whole on every device"
        if share.axes:
            verb = "stored" if share.is_stored_only else "divided"
            how = f"{verb} over {', '.join(share.axes)}"
        rows.append((share.name, size, how, str(share.num_parts), each))
    columns = (*words("axis"), *numbers("size"), *words("how"), *numbers("parts", "each device"))
    notes = (
        "divided: each device computes its part. stored: a device keeps its part; the parts are put together "
        "before use, layer by layer.",
    )
    return Sheet("Who holds what", columns, tuple(rows), notes)


def collective_sheet(plan: LayoutPlan) -> Sheet:
    """Table what the devices send to each other in each step."""
    title = "Exchange between devices"
    if not plan.collectives:
        return Sheet(title, tuple(words("what")), (("none: no device waits for another",),))
    rows = []
    for one in plan.collectives:
        between = one.kind, ", ".join(one.axes), str(one.num_devices)
        cost = size_text(one.num_bytes), f"{one.calls:,}", time_text(one.seconds)
        rows.append((one.step, one.part, *between, *cost))
    columns = (
        *words("step", "part", "kind"),
        Column("over", can_go=True),
        *numbers("devices", can_go=True),
        *numbers("bytes a call", "calls", "time"),
    )
    kinds = dict.fromkeys(one.kind for one in plan.collectives)
    meanings = [f"{kind}: {KIND_MEANINGS[kind]}." for kind in kinds if kind in KIND_MEANINGS]
    about = "bytes a call: what each device puts in. calls: in one step. time: of all calls together."
    return Sheet(title, columns, tuple(rows), (*meanings, about))


def roofline_sheet(plan: LayoutPlan) -> Sheet:
    """Table the time of each part of a step, and what limits it."""
    rows = []
    for step in STEPS:
        whole = plan.seconds(step)
        for part in (part for part in plan.parts if part.step == step):
            work = count_text(part.flops), size_text(part.num_bytes)
            cost = time_text(part.seconds), share_text(part.seconds, whole)
            rows.append((step, part.name, *work, *cost, part.bound))
        rows.append((step, "all parts", "", "", time_text(whole), share_text(whole, whole), ""))
    columns = (
        *words("step", "part"),
        *numbers("operations", "bytes moved", can_go=True),
        *numbers("time", "of step"),
        *words("limit"),
    )
    bounds = dict.fromkeys(part.bound for part in plan.parts)
    meanings = [f"{bound}: {BOUND_MEANINGS[bound]}." for bound in bounds if bound in BOUND_MEANINGS]
    device = plan.device
    peak = (
        f"{device.name}: {count_text(device.flops)} operations/s, {size_text(device.memory_bandwidth)}/s of "
        f"memory, {size_text(device.link_bandwidth)}/s between devices; {share_text(device.efficiency, 1)} "
        "of these peaks are counted on. The reference path, without kernels, does not come near them."
    )
    return Sheet("Time of each part, on each device", columns, tuple(rows), (*meanings, peak))


def comparison_sheet(plans: Sequence[LayoutPlan]) -> Sheet:
    """Table several plans side by side."""
    rows = []
    for plan in plans:
        decode, prefill = step_seconds(plan, "decode"), step_seconds(plan, "prefill")
        sending = sum(one.seconds for one in plan.collectives if one.step == "decode")
        grid = "x".join(str(size) for _, size in plan.mesh.axes)
        place = plan.layout.name, grid, "yes" if plan.fits else "no"
        held = size_text(plan.bytes_of()), size_text(plan.headroom)
        most = f"{plan.max_slots:,}", f"{plan.max_context:,}"
        costs = (
            time_text(decode) if decode else "-",
            rate_text(plan.decode_rate) if decode else "-",
            share_text(sending, decode) if decode else "-",
            rate_text(plan.prefill_rate) if prefill else "-",
        )
        rows.append((*place, *held, *most, *costs))
    columns = (
        *words("layout", "mesh", "fits"),
        *numbers("each device"),
        *numbers("free", can_go=True),
        *numbers("most slots", "longest context"),
        *numbers("decode step", can_go=True),
        *numbers("decode tokens/s"),
        *numbers("sending", "prefill tokens/s", can_go=True),
    )
    notes = (
        "most slots: that fit with this context. longest context: that fits with these slots.",
        "sending: between devices, share of a decode step.",
    )
    return Sheet("Layouts side by side", columns, tuple(rows), notes)


SHEETS: tuple[Callable[[LayoutPlan], Sheet], ...] = (
    memory_sheet,
    division_sheet,
    collective_sheet,
    roofline_sheet,
)
"""The tables of a report, in order."""
