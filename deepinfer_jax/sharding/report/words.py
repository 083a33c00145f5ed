"""Numbers and names as a reader sees them.

Separate because text, HTML and pictures must say the same thing in the same words.
Read next: `shares.py` (who holds what), `sheets.py` (the tables).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..layout_plan import LayoutPlan
from ..mesh import MeshShape

AXIS_NAMES = {
    "slots": "slots",
    "rows": "prompt rows",
    "experts": "experts",
    "heads": "query heads",
    "ffn": "expert channels",
    "vocab": "vocabulary rows",
    "engram_rows": "n-gram table rows",
    "o_groups": "output groups",
    "engram_output": "n-gram output channels",
}
"""Logical axes in plain words; others are shown as they are."""

KIND_MEANINGS = {
    "all-gather": "every device gets the parts of all devices",
    "all-reduce": "every device gets the sum over all devices",
    "reduce-scatter": "sums over all devices, of which each device gets its own part",
    "all-to-all": "every device sends a different part to every other device",
}
"""What each kind of collective does."""

BOUND_MEANINGS = {
    "compute": "arithmetic takes longest",
    "memory": "reading and writing the device's memory takes longest",
    "network": "sending between devices takes longest",
}
"""What limits a part of a step."""

STEP_MEANINGS = {
    "prefill": "reads a piece of the prompts",
    "decode": "makes the next token of every slot",
}
"""What each step does."""


def axis_name(word: str) -> str:
    """Name a logical axis."""
    return AXIS_NAMES.get(word, word.replace("_", " "))


def size_text(num_bytes: float) -> str:
    """Write bytes with three digits: 512 B, 4.71 MiB, 98.2 GiB."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if abs(num_bytes) < 999.5 or unit == "GiB":
            break
    return f"{_three_digits(num_bytes)} {unit}"


def time_text(seconds: float) -> str:
    """Write a time in milliseconds, or in seconds from one on."""
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms"


def count_text(count: float) -> str:
    """Write a large number with three digits: 1.25 T for 1.25e12."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:,.0f}"


def rate_text(rate: float) -> str:
    """Write a rate with three digits and commas: 161,000."""
    if rate < 100:
        return _three_digits(rate)
    scale = 10 ** (math.floor(math.log10(rate)) - 2)
    return f"{round(rate / scale) * scale:,.0f}"


def share_text(part: float, whole: float) -> str:
    """Write a share as 8.3% or 83%; "-" of nothing."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.05:
        return "<0.1%"
    return f"{share:.0f}%" if abs(share) >= 10 or not share else f"{share:.1f}%"


def division_text(divided: Sequence[tuple[str, tuple[str, ...]]], mesh: MeshShape) -> str:
    """Say over which mesh axes an array is divided, and into how many parts."""
    if not divided:
        return "whole on every device"
    return "; ".join(
        f"{axis_name(word)} over {', '.join(axes)}: {mesh.size(axes)} parts" for word, axes in divided
    )


def devices_text(plan: LayoutPlan) -> str:
    """Name the devices and their grid: 64 x H200 (mesh data=8 x model=8)."""
    return f"{plan.mesh.num_devices} x {plan.device.name} (mesh {plan.mesh})"


def load_text(plan: LayoutPlan) -> str:
    """Say what is to be held: slots, context, rows of a prefill step."""
    return (
        f"{plan.num_slots:,} slots of {plan.context:,} tokens; prefill steps of {plan.prefill_rows:,} "
        "prompt rows"
    )


def step_seconds(plan: LayoutPlan, step: str) -> float | None:
    """Give the predicted time of a step, None where nothing is predicted."""
    return plan.seconds(step) or None


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.0995 else 3
    return f"{value:,.{digits}f}"
