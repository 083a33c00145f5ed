"""The file that results go to: one process writes, whole lines only, each once.

Separate because all that must be right when a process is killed is here and in `done_lines`.
Read next: `records.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..sampling_params import RequestError
from .records import DoneLines, done_lines

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process away.
    fcntl = None


class OutputError(RuntimeError):
    """Results that could not be written, such as to a full disk: what, got, expected, how to fix."""


class RecordFile:
    """An output that this process alone may write to; nothing in it changes before the first write.

    Args:
        path: where; made if it does not exist.

    Raises:
        RequestError: no regular file, no permission, or another process writes to it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        # Every write goes to the end, also if the file was moved on.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise RequestError(
                f"output {path}: got {error.strerror}, expected a file that can be written; give another -o"
            ) from None
        try:
            self._require_own_file()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing gives the lock back; so does the end of the process, however it comes.
        os.close(self._descriptor)

    def done(self, keys: Sequence[int], in_order: bool) -> DoneLines:
        """Find out which lines of the input are done, as `done_lines`."""
        with open(self._path, "rb") as file:
            return done_lines(file, keys, str(self._path), in_order)

    def cut(self, size: int) -> None:
        """Drop what follows the first `size` bytes: half a record, or all."""
        os.ftruncate(self._descriptor, size)

    def write(self, record: bytes) -> None:
        """Add one line to the end, in one call of the system.

        Args:
            record: with its line ending.

        Raises:
            OutputError: the system wrote nothing, or a part; the next run drops the part.
        """
        try:
            rest = record[os.write(self._descriptor, record) :]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise OutputError(
                f"output {self._path}: got {error.strerror}, expected to add a line; free space there, and "
                "the same command continues"
            ) from None

    def _require_own_file(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise RequestError(
                f"output {self._path}: got a device or pipe, expected a file that can be continued; give "
                "another -o"
            )
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"output {self._path}: got a file that another process writes to, expected one of its own; "
                "wait for it, or give another -o"
            ) from None
        except OSError:
            # Some network file systems have no locks.
            return
