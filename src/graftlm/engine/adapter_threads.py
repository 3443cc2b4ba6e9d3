"""Threads in which adapters are read beside the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from graftlm.engine.background_thread import background_thread

# Some milliseconds of reading and checking.
SMALL_BYTES = 4 << 20
SMALL_THREADS = 4

Read = TypeVar("Read")


class AdapterThreads:
    """Large adapters are read one after the other in a thread that gives way to the steps, small ones in some that do
    not. Reading one of these is a millisecond of work, between which its thread waits for the interpreter for many.

    Args:
        name: what the threads' names begin with.
    """

    def __init__(self, name: str) -> None:
        self._large = background_thread(f"{name}-large")
        self._small = ThreadPoolExecutor(max_workers=SMALL_THREADS, thread_name_prefix=f"{name}-small")

    def submit(self, num_bytes: int | None, read: Callable[[], Read]) -> Future[Read]:
        """Read an adapter as soon as it is its turn.

        Args:
            num_bytes: of its files; None where that is not known beforehand.
        """
        thread = self._small if num_bytes is not None and num_bytes <= SMALL_BYTES else self._large
        return thread.submit(read)

    def close(self, *, cancel: bool = False) -> None:
        """Finish what is being read, and what waits unless it is cancelled; start nothing more."""
        for thread in (self._small, self._large):
            thread.shutdown(cancel_futures=cancel)
