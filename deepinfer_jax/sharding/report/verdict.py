"""The report in plain sentences: does it fit, what limits it, what to change.

Separate because it is the part that needs no knowledge of meshes to read.
Read next: `sheets.py`, the numbers behind it.
"""

from __future__ import annotations

from ..layout_plan import LayoutPlan, MemoryLine
from ..place import QUANTIZED_PART
from ..presets import PRESETS
from .words import (
    BOUND_MEANINGS,
    STEP_MEANINGS,
    rate_text,
    share_text,
    size_text,
    step_seconds,
    time_text,
)

_DIVIDES = (
    ("shared", "ffn"),
    ("expert", "experts"),
    ("engram", "engram_rows"),
    ("n-gram", "engram_rows"),
    ("embedding", "vocab"),
    ("vocab", "vocab"),
    ("head", "vocab"),
    ("attention", "heads"),
)
"""Word in the name of a kind of weight, and the logical axis that divides it."""

_CAN_BE_FREED = 0.02
"""Share of a device's memory below which dividing a kind of array is not worth a sentence."""


def verdict(plan: LayoutPlan) -> list[str]:
    """Say in sentences what a plan means.

    Args:
        plan: what is predicted.

    Returns:
        One sentence or two a line: whether it fits, the largest sizes that fit, what to change if it does
        not, what each step costs if it does.
    """
    return [_fit(plan), _largest(plan), *_changes(plan), *_steps(plan)]


def _fit(plan: LayoutPlan) -> str:
    memory, used = plan.device.memory_bytes, plan.bytes_of()
    whole = f"{size_text(memory)} of each {plan.device.name}"
    left = f"{size_text(abs(plan.headroom))} ({share_text(abs(plan.headroom), memory)})"
    if plan.fits:
        return f"It fits: {size_text(used)} are used of the {whole}; {left} stay free."
    return f"It does not fit: {size_text(used)} are needed of the {whole}, {left} too much."


def _changes(plan: LayoutPlan) -> list[str]:
    """Say what would make a plan fit, the largest gain first."""
    if plan.fits:
        return []
    lines = []
    gains = [(line, _gain(plan, line)) for line in plan.memory]
    worth = [pair for pair in gains if pair[1] > _CAN_BE_FREED * plan.device.memory_bytes]
    for line, gain in sorted(worth, key=lambda pair: pair[1], reverse=True)[:3]:
        word = _word_of(line)
        how = (
            f'by split={{"{word}": "*"}} in the layout{_presets_with(word)}'
            if word and not plan.layout.axes_of(word)
            else "over more of the axes of the mesh"
        )
        lines.append(
            f"Change: divide {line.name} over all devices, {how}: frees up to {size_text(gain)} on each."
        )
    if plan.bytes_of("activations") > -plan.headroom:
        lines.append("Change: take fewer rows in a prefill step, which makes the activations smaller.")
    return [*lines, *_more_devices(plan)]


def _more_devices(plan: LayoutPlan) -> list[str]:
    once = sum(line.total_bytes for line in plan.memory if line.group != "activations")
    least = -(-once // max(1, plan.device.memory_bytes - plan.bytes_of("activations")))
    if least <= plan.mesh.num_devices:
        return []
    return [
        f"Change: take more devices, at least {least:,}: weights and cache, counted once, are "
        f"{size_text(once)}, more than {plan.mesh.num_devices:,} x {plan.device.name} have."
    ]


def _gain(plan: LayoutPlan, line: MemoryLine) -> float:
    """Bytes that each device would save if the array were divided over all devices."""
    word = _word_of(line)
    if line.group == "activations" or word is None or not _can_be_shared(plan, word):
        return 0
    return line.num_bytes - line.total_bytes / plan.mesh.num_devices


def _can_be_shared(plan: LayoutPlan, word: str) -> bool:
    """Tell whether all devices can have equal parts of a logical axis."""
    config = plan.config
    # Heads go in whole output groups, channels in parts that share a scale; table rows are padded.
    parts = {
        "slots": plan.num_slots,
        "experts": config.n_routed_experts,
        "heads": config.o_groups,
        "ffn": config.moe_intermediate_size // QUANTIZED_PART,
        "vocab": config.vocab_size,
    }
    return parts.get(word, 0) % plan.mesh.num_devices == 0


def _word_of(line: MemoryLine) -> str | None:
    """Give the logical axis whose division makes a kind of array smaller on each device."""
    if line.divided:
        word = line.divided[0][0]
        return "slots" if word == "pages" else word
    if line.group == "cache":
        return "slots"
    name = line.name.lower()
    return next((word for part, word in _DIVIDES if part in name), None)


def _presets_with(word: str) -> str:
    names = [f'"{name}"' for name, layout in PRESETS.items() if layout.axes_of(word)]
    if len(names) < 2:
        return "".join(f", as {name} does" for name in names)
    return f", as {', '.join(names[:-1])} and {names[-1]} do"


def _largest(plan: LayoutPlan) -> str:
    weights = plan.bytes_of("weights")
    if weights > plan.device.memory_bytes:
        return f"Not one slot can fit: the weights alone are {size_text(weights)} on each device."
    if not plan.max_slots and not plan.max_context:
        return "No number of slots fits with this context, and no context with these slots."
    slots = f"at most {plan.max_slots:,} slots fit" if plan.max_slots else "no slot fits"
    context = f"at most {plan.max_context:,} tokens of context fit" if plan.max_context else "no context fits"
    return f"With {plan.context:,} tokens of context {slots}; with {plan.num_slots:,} slots {context}."


def _steps(plan: LayoutPlan) -> list[str]:
    """Say what each step costs; nothing of a plan that cannot run."""
    if not plan.fits:
        return []
    lines = []
    for step in ("decode", "prefill"):
        seconds = step_seconds(plan, step)
        if not seconds:
            continue
        if step == "decode":
            rate = f"{rate_text(plan.decode_rate)} tokens/s of all slots, {rate_text(1 / seconds)} of each"
        else:
            rate = f"{rate_text(plan.prefill_rate)} prompt tokens/s"
        lines.append(f"A {step} step ({STEP_MEANINGS[step]}) takes {time_text(seconds)}: {rate}.")
        lines.append(_slowest(plan, step, seconds))
    return lines


def _slowest(plan: LayoutPlan, step: str, seconds: float) -> str:
    """Name the part of a step that takes most, and the share of sending."""
    slowest = max((part for part in plan.parts if part.step == step), key=lambda part: part.seconds)
    sent = [one for one in plan.collectives if one.step == step]
    share = share_text(slowest.seconds, seconds)
    if slowest.bound == "network" and sent:
        most = max(sent, key=lambda one: one.seconds)
        what = f"{most.part} ({most.kind}, {share_text(most.seconds, seconds)})"
        return f"The largest part of the {step} step is sending between devices, {share}: above all {what}."
    why = BOUND_MEANINGS.get(slowest.bound, slowest.bound)
    sending = sum(one.seconds for one in sent)
    also = f" Sending between devices is {share_text(sending, seconds)} of the step." if sending else ""
    return f"The largest part of the {step} step is {slowest.name}, {share}: {why} there.{also}"
