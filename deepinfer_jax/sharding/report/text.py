"""A report as lines of plain or coloured text.

Separate because only here are widths and terminals known.
Read next: `verdict.py` and `sheets.py`, which say what is printed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..compiled_step import CompiledStep
from ..layout_plan import LayoutPlan
from .compiled_sheets import compiled_collective_sheet, compiled_memory_sheet
from .palette import FREE_COLOUR, memory_colours
from .sheets import FREE_KEY, SHEETS, Sheet, comparison_sheet, memory_keys
from .verdict import verdict
from .words import devices_text, load_text, size_text

MIN_WIDTH = 60
"""Fewest columns; a narrower terminal wraps the lines itself."""

LEFT_OUT = "A wider terminal shows more columns."
"""Below a table of which columns are left out."""

_GAP = 2
# One line of dashes below the names of the columns, in characters that every terminal has.
_DASHES = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def report_text(plan: LayoutPlan, width: int = 110, *, is_coloured: bool = False) -> str:
    """Write what is predicted of a layout as text.

    Args:
        plan: what is predicted.
        width: columns, at least `MIN_WIDTH`.
        is_coloured: whether escape codes of a terminal may be used.

    Returns:
        Lines with a newline after each, none wider than `width`.
    """
    console = _console(width, is_coloured)
    console.print(_title(f"Layout {plan.layout.name} on {devices_text(plan)}"))
    console.print(Text(plan.layout.intent))
    console.print(Text(load_text(plan)), end="\n\n")
    for line in verdict(plan):
        console.print(_bullet(line))
    console.print()
    console.print(_bar(plan, console.width))
    for make in SHEETS:
        _print_sheet(console, make(plan))
    return _written(console)


def comparison_text(plans: Sequence[LayoutPlan], width: int = 110, *, is_coloured: bool = False) -> str:
    """Write several plans side by side, in the order given.

    Args:
        plans: what is predicted of each.
        width: columns, at least `MIN_WIDTH`.
        is_coloured: whether escape codes of a terminal may be used.

    Returns:
        Lines with a newline after each, none wider than `width`.
    """
    console = _console(width, is_coloured)
    if plans:
        console.print(Text(f"{plans[0].mesh.num_devices} x {plans[0].device.name}; {load_text(plans[0])}"))
    _print_sheet(console, comparison_sheet(plans))
    return _written(console)


def compiled_text(
    plan: LayoutPlan, compiled: CompiledStep, width: int = 110, *, is_coloured: bool = False
) -> str:
    """Write the compiler's numbers beside the predicted ones.

    Args:
        plan: what is predicted.
        compiled: what the compiler says of one of its steps.
        width: columns, at least `MIN_WIDTH`.
        is_coloured: whether escape codes of a terminal may be used.

    Returns:
        Lines with a newline after each, none wider than `width`.
    """
    console = _console(width, is_coloured)
    for make in (compiled_memory_sheet, compiled_collective_sheet):
        _print_sheet(console, make(plan, compiled))
    return _written(console)


def _console(width: int, is_coloured: bool) -> Console:
    # Colours are decided by the caller alone, whatever the environment says.
    system = "256" if is_coloured else None
    return Console(
        file=io.StringIO(),
        width=max(width, MIN_WIDTH),
        force_terminal=is_coloured,
        color_system=system,
        no_color=not is_coloured,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    # Tables fill their last column with blanks.
    return "\n".join(line.rstrip() for line in console.file.getvalue().split("\n"))


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _bullet(line: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("-"), Text(line))
    return grid


def _bar(plan: LayoutPlan, width: int) -> Text:
    """Draw the memory of a device as one line of letters, each the key of its kind."""
    memory = plan.device.memory_bytes
    room = width - 2
    scale = room / max(memory, plan.bytes_of())
    bar, so_far, drawn = Text("["), 0, 0
    for key, line, colour in zip(memory_keys(plan), plan.memory, memory_colours(plan), strict=True):
        so_far += line.num_bytes
        length = round(so_far * scale) - drawn
        bar.append(key * length, style=f"black on {colour}")
        drawn += length
    bar.append(FREE_KEY * (room - drawn), style=f"black on {FREE_COLOUR}")
    bar.append("]")
    if not plan.fits:
        end = 1 + round(memory * scale)
        bar.append("\n" + " " * (end - 1) + "^ " if end < width // 2 else "\n", style="bold red")
        note = f"the end of the device's {size_text(memory)}"
        bar.append(note if end < width // 2 else f"{note} ^".rjust(end), style="bold red")
    return bar


def _print_sheet(console: Console, sheet: Sheet) -> None:
    console.print()
    console.print(_title(sheet.title))
    kept = _columns_that_fit(sheet, console.width)
    table = Table(box=_DASHES, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for i in kept:
        column = sheet.columns[i]
        justify = "right" if column.is_number else "left"
        least = _least_width(sheet, i)
        table.add_column(column.name, justify=justify, no_wrap=column.is_number, min_width=least)
    for number, row in enumerate(sheet.rows):
        is_total = sheet.has_total and number == len(sheet.rows) - 1
        table.add_row(*(Text(row[i]) for i in kept), style="bold" if is_total else None)
    console.print(table)
    for note in sheet.notes:
        console.print(Text(note, style="dim"))
    if len(kept) < len(sheet.columns):
        console.print(Text(LEFT_OUT, style="dim"))


def _columns_that_fit(sheet: Sheet, width: int) -> list[int]:
    """Leave out columns, the rightmost first, until no number and no word has to be cut."""
    kept = list(range(len(sheet.columns)))
    spare = [i for i in kept if sheet.columns[i].can_go]
    while spare and sum(_least_width(sheet, i) + _GAP for i in kept) - _GAP > width:
        kept.remove(spare.pop())
    return kept


def _least_width(sheet: Sheet, index: int) -> int:
    """Width of the longest number or word of a column."""
    column = sheet.columns[index]
    cells = [row[index] for row in sheet.rows]
    parts = [word for cell in cells for word in ([cell] if column.is_number else cell.split())]
    return max(len(part) for part in [column.name, *parts])
