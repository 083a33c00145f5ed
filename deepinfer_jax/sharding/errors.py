"""The one error of this folder.

Separate because mesh and layout both raise it.
Read next: `layout.py`.
"""

from __future__ import annotations


class LayoutError(ValueError):
    """A mesh or a layout that cannot hold the model: what, got, expected, how to fix it."""
