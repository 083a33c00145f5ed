"""What a user sees while something long runs.

Separate so that one rule holds everywhere: shown on a terminal and in a notebook, quiet when piped.
Read next: `generate.py`, `llm.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_console = Console(stderr=True)


@contextmanager
def working_on(message: str) -> Iterator[None]:
    """Show a message while the body runs.

    Args:
        message: what is being done, such as "compiling decode for 8 slots".
    """
    if not (_console.is_terminal or _console.is_jupyter):
        yield
        return
    with _console.status(message):
        yield
