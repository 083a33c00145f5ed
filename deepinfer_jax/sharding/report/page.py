"""A report as HTML for notebooks and browsers.

Separate because only here is there markup; every word from outside is escaped.
Read next: `sheets.py`, `picture.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..layout_plan import LayoutPlan
from .palette import FREE_COLOUR, memory_colours
from .picture import report_svg
from .sheets import SHEETS, Sheet, comparison_sheet, memory_keys
from .verdict import verdict
from .words import devices_text, load_text, share_text, size_text

# Its own light background: notebooks may be dark.
_STYLE = """<style>
.layout-report{font:13px/1.45 system-ui,sans-serif;color:#111;background:#fff;padding:12px;max-width:1000px}
.layout-report h3{margin:0 0 4px;font-size:17px}
.layout-report h4{margin:18px 0 4px;font-size:14px}
.layout-report p{margin:2px 0}
.layout-report ul{margin:8px 0;padding-left:20px}
.layout-report table{border-collapse:collapse;margin:0;color:#111;background:#fff}
.layout-report th,.layout-report td{padding:2px 10px 2px 0;text-align:left;vertical-align:top;border:0}
.layout-report th{border-bottom:1px solid #999}
.layout-report .number{text-align:right;white-space:nowrap}
.layout-report .total td{border-top:1px solid #999;font-weight:600}
.layout-report .note{color:#555;font-size:12px}
.layout-report .bar{display:flex;height:22px;border:1px solid #999;margin:8px 0 2px;overflow:hidden}
.layout-report .bar div{min-width:0;overflow:hidden;text-align:center;font-size:12px;line-height:22px}
.layout-report .bad{color:#b00020;font-weight:600}
.layout-report svg{max-width:100%;height:auto}
</style>"""


def report_html(plan: LayoutPlan) -> str:
    """Write what is predicted of a layout as one HTML element.

    Args:
        plan: what is predicted.

    Returns:
        A `div` with its own style and picture: nothing is loaded from elsewhere.
    """
    first, *others = verdict(plan)
    state = "good" if plan.fits else "bad"
    parts = [
        f"<h3>{escape(f'Layout {plan.layout.name} on {devices_text(plan)}')}</h3>",
        f"<p>{escape(plan.layout.intent)}</p>",
        f"<p>{escape(load_text(plan))}</p>",
        f"<ul><li class='{state}'>{escape(first)}</li>",
        *(f"<li>{escape(line)}</li>" for line in others),
        "</ul>",
        _bar(plan),
        report_svg(plan),
        *(_sheet(make(plan)) for make in SHEETS),
    ]
    return _wrapped(parts)


def comparison_html(plans: Sequence[LayoutPlan]) -> str:
    """Write several plans side by side as one HTML element, in the order given.

    Args:
        plans: what is predicted of each.

    Returns:
        A `div` with its own style: the table, and the memory of a device under each layout.
    """
    parts = []
    if plans:
        load = f"{plans[0].mesh.num_devices} x {plans[0].device.name}; {load_text(plans[0])}"
        parts.append(f"<p>{escape(load)}</p>")
    parts.append(_sheet(comparison_sheet(plans)))
    for plan in plans:
        parts.append(f"<h4>{escape(f'{plan.layout.name} on {plan.mesh}')}</h4>{_bar(plan)}")
    return _wrapped(parts)


def page(title: str, element: str) -> str:
    """Make a whole page of an element, for a file.

    Args:
        title: of the page, as plain text.
        element: HTML, as the other functions here give it.

    Returns:
        An HTML document.
    """
    head = f"<head><meta charset='utf-8'><title>{escape(title)}</title></head>"
    return f"<!doctype html>\n<html lang='en'>{head}<body>\n{element}\n</body></html>\n"


def _wrapped(parts: Sequence[str]) -> str:
    return "\n".join([f"<div class='layout-report'>{_STYLE}", *parts, "</div>"])


def _bar(plan: LayoutPlan) -> str:
    """Stack the memory of a device; a line marks its end where more is needed."""
    memory = plan.device.memory_bytes
    whole = max(memory, plan.bytes_of())
    pieces = []
    for key, line, colour in zip(memory_keys(plan), plan.memory, memory_colours(plan), strict=True):
        told = (
            f"{line.group}: {line.name}, {size_text(line.num_bytes)} ({share_text(line.num_bytes, memory)})"
        )
        pieces.append(_piece(100 * line.num_bytes / whole, colour, told, key))
    if plan.fits:
        told = f"free: {size_text(plan.headroom)}"
        pieces.append(_piece(100 * plan.headroom / whole, FREE_COLOUR, told, "free"))
    bar = f"<div class='bar'>{''.join(pieces)}</div>"
    if plan.fits:
        return bar
    end = 100 * memory / whole
    note = f"the device ends here: {size_text(memory)}"
    return f"{bar}<p class='bad' style='border-right:2px solid #b00020;width:{end:.2f}%'>{escape(note)}</p>"


def _piece(percent: float, colour: str, told: str, label: str) -> str:
    # A letter needs about two hundredths of the width.
    shown = escape(label) if percent > 2 else ""
    return f"<div style='width:{percent:.3f}%;background:{colour}' title='{escape(told)}'>{shown}</div>"


def _sheet(sheet: Sheet) -> str:
    classes = [" class='number'" if column.is_number else "" for column in sheet.columns]
    names = [column.name for column in sheet.columns]
    head = "".join(f"<th{style}>{escape(name)}</th>" for name, style in zip(names, classes, strict=True))
    lines = []
    for i, row in enumerate(sheet.rows):
        total = " class='total'" if sheet.has_total and i == len(sheet.rows) - 1 else ""
        cells = "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row, classes, strict=True))
        lines.append(f"<tr{total}>{cells}</tr>")
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in sheet.notes)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h4>{escape(sheet.title)}</h4>\n{table}\n{notes}"
