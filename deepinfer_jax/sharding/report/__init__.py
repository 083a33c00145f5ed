"""Reports of what is predicted of a layout: text, HTML for notebooks, an SVG picture. Pure functions.

Separate because nothing here computes a prediction: it says what a `LayoutPlan` holds.
Read next: `verdict.py` (in sentences), `sheets.py` (in tables), `picture.py` (as a picture).
"""

from __future__ import annotations

from .page import comparison_html, page, report_html
from .picture import report_svg
from .show import Shown, show
from .text import comparison_text, compiled_text, report_text

__all__ = [
    "Shown",
    "comparison_html",
    "comparison_text",
    "compiled_text",
    "page",
    "report_html",
    "report_svg",
    "report_text",
    "show",
]
