"""The one error of this folder and how its lists are shortened.

Separate because every module here raises it.
Read next: `reader.py`, which raises the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint that this package refuses, with the tensor or file, what it got and what it expects."""


def shorten(items: Sequence[str]) -> str:
    """Join at most ten items and count the rest.

    Args:
        items: descriptions in order.

    Returns:
        One line.
    """
    rest = len(items) - _SHOWN
    return "; ".join(items[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
