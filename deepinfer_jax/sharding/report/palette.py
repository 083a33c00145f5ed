"""The colours of groups of memory and of logical axes.

Separate because text, HTML and pictures share them.
Read next: `picture.py`.
"""

from __future__ import annotations

from ..layout_plan import LayoutPlan

GROUP_COLOURS = {
    "weights": ("#7fb3e0", "#a9cdec", "#5b9bd5", "#c6def3"),
    "cache": ("#7fcfa5", "#a9dfc2", "#5bbf8b", "#c6ecd8"),
    "activations": ("#f2b56b", "#f6cb97", "#eda24a"),
}
"""Shades of each group of memory, taken in turn."""

OTHER_COLOUR = "#c9b3dd"
"""Shade of any other group."""

FREE_COLOUR = "#eeeeee"
"""Shade of memory that stays free."""

AXIS_COLOURS = {
    "slots": "#0072b2",
    "rows": "#56b4e9",
    "experts": "#d55e00",
    "heads": "#009e73",
    "ffn": "#e69f00",
    "vocab": "#cc79a7",
    "engram_rows": "#8c6d1f",
}
"""Colour of each logical axis, told apart also by the colour-blind (Okabe and Ito)."""

OTHER_AXIS_COLOUR = "#666666"
"""Colour of axes that are only stored in parts."""


def memory_colours(plan: LayoutPlan) -> list[str]:
    """Give each memory line a shade of its group, neighbours different ones."""
    seen: dict[str, int] = {}
    colours = []
    for line in plan.memory:
        number = seen.get(line.group, 0)
        seen[line.group] = number + 1
        shades = GROUP_COLOURS.get(line.group, (OTHER_COLOUR,))
        colours.append(shades[number % len(shades)])
    return colours


def axis_colour(word: str) -> str:
    """Give a logical axis its colour."""
    return AXIS_COLOURS.get(word, OTHER_AXIS_COLOUR)
