"""The compiler's numbers beside the predicted ones, as tables.

Separate because a report needs no compiler.
Read next: `sheets.py`, `text.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..compiled_step import CompiledStep
from ..cost import input_bytes
from ..layout_plan import Collective, LayoutPlan
from .sheets import Sheet, numbers, words
from .words import size_text


def compiled_memory_sheet(plan: LayoutPlan, compiled: CompiledStep) -> Sheet:
    """Table the compiler's bytes beside the predicted ones.

    Args:
        plan: what is predicted.
        compiled: what the compiler says of one of its steps.

    Returns:
        The table.
    """
    arguments = plan.bytes_of("weights") + plan.bytes_of("cache") + input_bytes(plan, compiled.step)
    # The plan keeps room for the larger of both steps; this is one of them.
    temporaries = sum(size for step, _, size in plan.temporaries if step == compiled.step)
    pairs = (
        ("arguments", arguments, compiled.argument_bytes),
        ("temporaries", temporaries, compiled.temporary_bytes),
        ("peak", arguments + temporaries, compiled.peak_bytes),
    )
    rows = [
        (name, size_text(guess), size_text(found), _difference(guess, found)) for name, guess, found in pairs
    ]
    rows.append(("output", "", size_text(compiled.output_bytes), ""))
    rows.append(("output written over arguments", "", size_text(compiled.alias_bytes), ""))
    columns = (*words("bytes of each device"), *numbers("predicted", "compiled", "difference"))
    notes = (
        "arguments: weights, cache and inputs. temporaries: values that live only inside the step.",
        f"Compiled in {compiled.seconds_to_compile:.0f} s with {size_text(compiled.host_peak_bytes)} of this "
        "computer's memory.",
    )
    title = f"The {compiled.step} step, predicted and compiled for {compiled.target}"
    return Sheet(title, columns, tuple(rows), notes)


def compiled_collective_sheet(plan: LayoutPlan, compiled: CompiledStep) -> Sheet:
    """Table the collectives found in the compiled step beside the predicted ones.

    Those of equal kind, devices and bytes are counted together: a compiled program does not say what
    they are for.

    Args:
        plan: what is predicted.
        compiled: what the compiler says of one of its steps.

    Returns:
        The table.
    """
    expected = [one for one in plan.collectives if one.step == compiled.step]
    predicted, found = _calls(expected), _calls(compiled.collectives)
    rows = []
    for shape in dict.fromkeys([*predicted, *found]):
        kind, devices, num_bytes = shape
        change = found[shape] - predicted[shape]
        parts = dict.fromkeys(one.part for one in expected if _shape(one) == shape)
        counts = f"{predicted[shape]:,}", f"{found[shape]:,}", f"{change:+,}" if change else "equal"
        rows.append((kind, str(devices), size_text(num_bytes), *counts, ", ".join(parts)))
    columns = (
        *words("kind"),
        *numbers("devices", "bytes a call", "predicted", "compiled", "difference"),
        *words("for"),
    )
    return Sheet("Calls of each collective, predicted and compiled", columns, tuple(rows))


def _shape(one: Collective) -> tuple[str, int, int]:
    return one.kind, one.num_devices, one.num_bytes


def _calls(collectives: Sequence[Collective]) -> Counter[tuple[str, int, int]]:
    calls: Counter[tuple[str, int, int]] = Counter()
    for one in collectives:
        calls[_shape(one)] += one.calls
    return calls


def _difference(guess: int, found: int) -> str:
    if guess == found:
        return "equal"
    return f"{100 * (found - guess) / guess:+.1f}%" if guess else "-"
