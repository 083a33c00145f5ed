"""Which implementation of an operation runs: the best available one, or exactly the named one.

Separate so that all operations choose, and refuse, in the same way.
Read next: `pallas/sparse_attention/api.py`, which chooses after it has checked its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class ImplementationError(ValueError):
    """A named implementation that does not exist or cannot run here."""


class Unavailable(NamedTuple):
    """Stands in a table for an implementation that cannot run on this device or on these operands."""

    reason: str


def choose(
    op: str, implementation: str | None, available: Mapping[str, Callable[..., Any] | Unavailable]
) -> Callable[..., Any]:
    """Choose the implementation of an operation.

    Args:
        op: the operation, for messages.
        implementation: a name in the table, or None for the first that can run.
        available: name -> function, or why it cannot run; the best first.

    Returns:
        The function.

    Raises:
        ImplementationError: the name is unknown, it cannot run, or nothing can.
    """
    if implementation is None:
        for function in available.values():
            if not isinstance(function, Unavailable):
                return function
        raise ImplementationError(f"{op}: no implementation can run: {_reasons(available)}")
    chosen = available.get(implementation)
    if chosen is None:
        raise ImplementationError(
            f"{op}: got implementation {implementation!r}, which does not exist; expected one of "
            f"{_reasons(available)}, or None for the best"
        )
    if isinstance(chosen, Unavailable):
        raise ImplementationError(
            f"{op}: implementation {implementation!r} cannot run: {chosen.reason}; expected one of "
            f"{_reasons(available)}, or None for the best"
        )
    return chosen


def _reasons(available: Mapping[str, Callable[..., Any] | Unavailable]) -> str:
    found = [
        f"{name!r} (not here: {function.reason})" if isinstance(function, Unavailable) else repr(name)
        for name, function in available.items()
    ]
    return ", ".join(found)
