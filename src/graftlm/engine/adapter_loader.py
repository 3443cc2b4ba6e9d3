"""Reading the weights of adapters for which the scheduler has made room: between two steps, or beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from graftlm.adapters import Adapter, AdapterWeights
from graftlm.engine.adapter_threads import AdapterThreads
from graftlm.errors import AdapterError, GraftError

logger = logging.getLogger(__name__)

# Reads an adapter's weights, or raises AdapterError.
ReadWeights = Callable[[Adapter], AdapterWeights]


@dataclass(frozen=True, kw_only=True)
class FinishedLoad:
    """result: the weights, or why there are none. seconds: that reading took."""

    adapter: Adapter
    result: AdapterWeights | GraftError
    seconds: float


class AdapterLoader(Protocol):
    """Each load that is started is among the finished ones exactly once. Used by the engine's thread."""

    def start(self, adapter: Adapter) -> None: ...

    def finished(self) -> list[FinishedLoad]:
        """What has ended since the last call."""
        ...

    def read(self, adapter: Adapter) -> AdapterWeights:
        """Read an adapter in this thread, beside what has been started.

        Raises:
            AdapterError
        """
        ...

    def close(self) -> None:
        """Start nothing more; what is being read is finished first."""
        ...


class InlineLoader:
    """Reads at once."""

    def __init__(self, read: ReadWeights) -> None:
        self.read = read
        self._finished: list[FinishedLoad] = []

    def start(self, adapter: Adapter) -> None:
        self._finished.append(_load(adapter, self.read))

    def finished(self) -> list[FinishedLoad]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        pass


class BackgroundLoader:
    """Reads while steps go on.

    Args:
        wake: called in the reading threads whenever a load has ended.
    """

    def __init__(self, read: ReadWeights, wake: Callable[[], None]) -> None:
        self.read = read
        self._wake = wake
        self._finished: SimpleQueue[FinishedLoad] = SimpleQueue()
        self._threads = AdapterThreads("graft-loader")

    def start(self, adapter: Adapter) -> None:
        self._threads.submit(adapter.num_bytes, partial(self._run, adapter))

    def finished(self) -> list[FinishedLoad]:
        finished = []
        while True:
            try:
                finished.append(self._finished.get_nowait())
            except Empty:
                return finished

    def close(self) -> None:
        self._threads.close(cancel=True)

    def _run(self, adapter: Adapter) -> None:
        self._finished.put(_load(adapter, self.read))
        self._wake()


def _load(adapter: Adapter, read: ReadWeights) -> FinishedLoad:
    begun = time.perf_counter()
    result = _read(adapter, read)
    return FinishedLoad(adapter=adapter, result=result, seconds=time.perf_counter() - begun)


def _read(adapter: Adapter, read: ReadWeights) -> AdapterWeights | GraftError:
    try:
        return read(adapter)
    except AdapterError as error:
        return error
    except Exception:
        logger.exception("adapter %s could not be loaded", adapter.name)
        return GraftError(f"adapter {adapter.name} could not be loaded", do="see the server's log")
