"""Gives work to the devices in order, from a thread of its own where steps overlap.

Separate because giving a step to a GPU takes as long as the step: what it branches on is read back while
it runs. On its own thread that costs the scheduler nothing.
Read next: `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Dispatcher:
    """Runs calls one after the other.

    Args:
        has_thread: whether calls run beside the caller, rather than before `submit` returns.
    """

    def __init__(self, has_thread: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-dispatch") if has_thread else None

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        """Put a call behind all earlier ones.

        Args:
            work: the call.

        Returns:
            Its result, or what it raised, once it is there.
        """
        if self._pool is not None:
            return self._pool.submit(work)
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def drain(self) -> None:
        """Wait until nothing runs any more."""
        self.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until nothing runs any more, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
