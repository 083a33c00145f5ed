"""What a user sees while something long runs.

Separate so that one rule holds everywhere: shown on a terminal and in a notebook, quiet when piped.
Read next: `generate.py`, `llm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_console = Console(stderr=True)
_bars: list[Progress] = []
"""Bars that are shown now."""


@contextmanager
def working_on(message: str) -> Iterator[None]:
    """Show a message while the body runs.

    Args:
        message: what is being done, such as "compiling decode for 8 slots".
    """
    if not (_console.is_terminal or _console.is_jupyter):
        yield
    elif _bars:
        # A console shows one moving thing at a time: beside a bar this is a line above it.
        _console.print(message)
        yield
    else:
        with _console.status(message):
            yield


@contextmanager
def showing_bar(*columns: ProgressColumn) -> Iterator[Progress | None]:
    """Show a bar while the body runs.

    Args:
        columns: what is in it.

    Yields:
        The bar, without a task yet; None where nothing is shown, or another bar is.
    """
    if _bars or not (_console.is_terminal or _console.is_jupyter):
        yield None
        return
    with Progress(*columns, console=_console, transient=True) as progress:
        _bars.append(progress)
        try:
            yield progress
        finally:
            _bars.remove(progress)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the body runs, if there is more than one thing to do.

    Args:
        what: is being done, such as "generating".
        total: things to do.

    Yields:
        To be called with (things done since the last call, tokens made so far).
    """
    if total < 2:
        yield lambda done, tokens: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with showing_bar(*columns, TimeRemainingColumn()) as progress:
        if progress is None:
            yield lambda done, tokens: None
            return
        task = progress.add_task(what, total=total, rate="")
        start: list[int] = []

        def count(done: int, tokens: int) -> None:
            start[:] = start or [tokens]
            seconds = progress.tasks[0].elapsed or 0.0
            rate = f"{(tokens - start[0]) / seconds:.0f} tokens/s" if seconds else ""
            progress.update(task, advance=done, rate=rate)

        yield count
