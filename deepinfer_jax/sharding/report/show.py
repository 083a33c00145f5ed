"""One value that reads well in a notebook and in a terminal.

Separate because a notebook asks a value for its HTML and a terminal for its text.
Read next: `page.py`, `text.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout_plan import LayoutPlan
from .page import comparison_html, report_html
from .text import comparison_text, report_text


@dataclass(frozen=True, slots=True)
class Shown:
    """A report in both forms.

    Args:
        text: for a terminal.
        html: for a notebook.
    """

    text: str
    html: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def show(plans: LayoutPlan | Sequence[LayoutPlan]) -> Shown:
    """Report on one plan, or compare several.

    Args:
        plans: one plan, or several in the order in which they are to be listed.

    Returns:
        What a notebook shows as a page and `print` as text.
    """
    if isinstance(plans, LayoutPlan):
        return Shown(report_text(plans), report_html(plans))
    return Shown(comparison_text(plans), comparison_html(plans))
