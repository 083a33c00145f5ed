"""An SVG picture of who holds what: devices as cells of the mesh, logical axes as colours.

Separate because it is drawing; the shares come from `shares.py`.
Read next: `page.py`, which shows it above the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..layout_plan import LayoutPlan
from .palette import axis_colour
from .shares import Share, places, shares_of
from .words import devices_text

MOST_SHOWN = 8
"""Rows or columns of devices drawn in full; of more, the first ones and the last ones."""

_FIRST, _LAST = 5, 2
_WIDTH, _MARGIN, _GAP = 960, 16, 10
_LINE = 16
_BAR = 8
_LABEL = 13
_LABELLED_WIDTH = 180
_FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Devices arranged for drawing: None where some are left out.

    Args:
        rows: devices of each row, by number.
        labels: of the rows.
        num_columns: cells of the longest row.
    """

    rows: tuple[tuple[int | None, ...], ...]
    labels: tuple[str, ...]
    num_columns: int


def report_svg(plan: LayoutPlan) -> str:
    """Draw who holds what.

    A cell is a device. In it every logical axis has a bar: the grey track is the whole axis, the coloured
    part what the device holds. A hollow part is only stored there.

    Args:
        plan: the layout and its sizes.

    Returns:
        One SVG element, with nothing outside it needed.
    """
    shares, grid = shares_of(plan), _arrange(plan)
    label_width = 0 if grid.labels == ("",) else 7 * max(len(label) for label in grid.labels) + 10
    room = _WIDTH - 2 * _MARGIN - label_width
    cell_width = min(260.0, (room + _GAP) / grid.num_columns - _GAP)
    pitch = _pitch(cell_width)
    cell_height = 20 + len(shares) * pitch + 4
    top = _MARGIN + 2 * _LINE + 6
    body = [_heading(plan)]
    y = float(top)
    for label, row in zip(grid.labels, grid.rows, strict=True):
        if not row:
            body.append(_text(_MARGIN, y + 8, "...", size=14))
            y += 22
            continue
        if label:
            body.append(_text(_MARGIN, y + cell_height / 2 + 4, label, size=12))
        for column, device in enumerate(row):
            x = _MARGIN + label_width + column * (cell_width + _GAP)
            body.append(_cell(plan, shares, device, (x, y, cell_width, cell_height)))
        y += cell_height + _GAP
    legend, height = _legend(shares, y + 6)
    total = height + _MARGIN
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {total:.0f}' width='{_WIDTH}' "
        f"height='{total:.0f}' role='img' {_FONT}>"
    )
    title = f"<title>{escape(f'Layout {plan.layout.name} on {devices_text(plan)}')}</title>"
    background = f"<rect width='{_WIDTH}' height='{total:.0f}' fill='#ffffff'/>"
    return "\n".join([head, title, background, *body, *legend, "</svg>"])


def _arrange(plan: LayoutPlan) -> _Grid:
    """Lay out one axis in lines of `MOST_SHOWN`, more axes with the last one across."""
    axes = plan.mesh.axes
    *leading, (_, across) = axes
    num_devices = plan.mesh.num_devices
    if not leading:
        across = min(MOST_SHOWN, num_devices)
    lines = [tuple(range(i, min(i + across, num_devices))) for i in range(0, num_devices, across)]
    labels = [_row_label(plan, line[0]) if len(lines) > 1 else "" for line in lines]
    rows = [_shorten(line) for line in lines]
    if len(rows) > MOST_SHOWN:
        rows = [*rows[:_FIRST], (), *rows[-_LAST:]]
        labels = [*labels[:_FIRST], "", *labels[-_LAST:]]
    return _Grid(tuple(rows), tuple(labels), max(len(row) for row in rows))


def _shorten(line: tuple[int, ...]) -> tuple[int | None, ...]:
    return line if len(line) <= MOST_SHOWN else (*line[:_FIRST], None, *line[-_LAST:])


def _row_label(plan: LayoutPlan, device: int) -> str:
    place = places(plan.mesh)[device]
    leading = plan.mesh.names[:-1]
    if not leading:
        return f"{plan.mesh.names[0]} {device}.."
    return ", ".join(f"{name} {position}" for name, position in zip(leading, place, strict=False))


def _heading(plan: LayoutPlan) -> str:
    across = plan.mesh.names[-1]
    order = f"{across} runs from left to right"
    if len(plan.mesh.names) == 1 and plan.mesh.num_devices > MOST_SHOWN:
        order += ", line after line"
    return "\n".join(
        [
            _text(_MARGIN, _MARGIN + 12, f"{plan.layout.name} on {devices_text(plan)}", size=15, weight=600),
            _text(_MARGIN, _MARGIN + 12 + _LINE, f"A cell is a device; {order}.", size=12, fill="#555555"),
        ]
    )


def _cell(
    plan: LayoutPlan,
    shares: Sequence[Share],
    device: int | None,
    box: tuple[float, float, float, float],
) -> str:
    x, y, width, height = box
    if device is None:
        return _text(x + width / 2 - 6, y + height / 2, "...", size=14)
    place = places(plan.mesh)[device]
    where = ", ".join(f"{name} {position}" for name, position in zip(plan.mesh.names, place, strict=True))
    held = [(share, share.part_of(place, plan.mesh)) for share in shares]
    told = "\n".join([f"device {device} ({where})", *(f"{one.name}: {one.held(part)}" for one, part in held)])
    drawn = [f"<g><title>{escape(told)}</title>"]
    drawn.append(
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='4' fill='#fafafa' "
        "stroke='#999999'/>"
    )
    drawn.append(
        _text(x + 6, y + 14, f"device {device}" if width >= 90 else str(device), size=11, weight=600)
    )
    for row, (share, part) in enumerate(held):
        drawn.append(_track(share, part, x + 6, y + 20 + row * _pitch(width), width - 12))
    return "\n".join([*drawn, "</g>"])


def _track(share: Share, part: int, x: float, y: float, width: float) -> str:
    """Draw the whole axis in grey and the part of a device in colour, wide enough to be seen."""
    colour = axis_colour(share.word)
    length = max(1.5, width / share.num_parts)
    start = min(x + width * part / share.num_parts, x + width - length)
    fill = f"fill='{colour}'" + (f" fill-opacity='.25' stroke='{colour}'" if share.is_stored_only else "")
    drawn = []
    if width + 12 >= _LABELLED_WIDTH:
        drawn.append(_text(x, y + 10, f"{share.name}: {share.held(part)}", size=10))
        y += _LABEL
    drawn.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{_BAR}' fill='#dddddd'/>")
    drawn.append(f"<rect x='{start:.2f}' y='{y:.1f}' width='{length:.2f}' height='{_BAR}' {fill}/>")
    return "".join(drawn)


def _pitch(cell_width: float) -> int:
    """Height of one axis in a cell: a bar, with a line of text above it where there is room."""
    return _BAR + 3 + (_LABEL if cell_width >= _LABELLED_WIDTH else 0)


def _legend(shares: Sequence[Share], y: float) -> tuple[list[str], float]:
    lines = []
    for share in shares:
        colour = axis_colour(share.word)
        hollow = f" fill-opacity='.25' stroke='{colour}'" if share.is_stored_only else ""
        lines.append(f"<rect x='{_MARGIN}' y='{y:.1f}' width='12' height='12' fill='{colour}'{hollow}/>")
        lines.append(_text(_MARGIN + 20, y + 10, share.summary(), size=12))
        y += _LINE + 2
    note = (
        "Grey: the whole axis. Colour: the part that the device holds. Pale: stored, put together before use."
    )
    lines.append(_text(_MARGIN, y + 12, note, size=11, fill="#555555"))
    return lines, y + _LINE


def _text(x: float, y: float, text: str, size: int, weight: int = 400, fill: str = "#111111") -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{fill}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"
