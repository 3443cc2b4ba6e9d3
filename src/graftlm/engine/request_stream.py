"""What a caller holds of a running request: its deltas as they come, and the way to stop it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from graftlm.engine.job import Job
from graftlm.engine.outputs import OutputCollector, RequestOutput
from graftlm.errors import DeadlineExceeded, GraftError

logger = logging.getLogger(__name__)

# A delta holds one token or a few; more of them than this that nobody has read become one.
MAX_UNREAD = 64


class RequestStream:
    """The deltas of one request, as an async iterator. Leaving it early needs `abort`, or the work goes on.

    Deltas that are not read are joined: a reader that falls behind, or never reads, costs the text itself and no more.

    Args:
        abort: stops the work on a request, given its id.

    num_output_tokens: of all answers, those that nobody has read yet included.
    """

    def __init__(self, job: Job, abort: Callable[[str], None]) -> None:
        self.request_id = job.job_id
        self.prompt_token_ids = job.prompt_token_ids
        self.num_answers = len(job.requests)
        self.adapter = None if job.adapter is None else job.adapter.name
        self.timings = job.timings
        self.num_output_tokens = 0
        self._abort = abort
        self._unread: deque[RequestOutput] = deque()
        self._error: GraftError | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def put(items: Iterable[tuple[RequestStream, RequestOutput | GraftError]]) -> None:
        """Hand streams a delta each, or the error that ends them. Called by the engine's thread."""
        # Together: waking an event loop is a system call, and has it take the interpreter from the engine.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput | GraftError]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream._loop, []).append((stream, item))
        for loop, received in by_loop.items():
            try:
                loop.call_soon_threadsafe(_receive_each, received)
            except RuntimeError:
                logger.debug("requests %s: their event loop is gone", [stream.request_id for stream, _ in received])

    def expire_at(self, deadline: float, timeout: float) -> None:
        """Give the request up at a certain time unless it has ended.

        Args:
            deadline: on the event loop's clock. timeout: the seconds by which its caller knows that time.
        """
        self._timer = self._loop.call_at(deadline, self._expire, timeout)

    async def ended(self) -> None:
        """Wait until the last delta or an error is there, read or not."""
        await self._ended.wait()

    def abort(self) -> None:
        """Stop the request wherever it is; its blocks and its hold on the adapter are freed. May be called twice."""
        self._abort(self.request_id)

    async def collect(self) -> RequestOutput:
        """Wait for the complete output. Aborts the request if the wait is cancelled."""
        collector = OutputCollector()
        try:
            async for delta in self:
                collector.add(delta)
        except asyncio.CancelledError:
            self.abort()
            raise
        return collector.result()

    def receive(self, item: RequestOutput | GraftError) -> None:
        """Take what was put, in the event loop's thread."""
        if self._ended.is_set():
            return  # what the engine still said before it heard of the end
        if isinstance(item, GraftError):
            self._error = item
        else:
            self.num_output_tokens = item.num_output_tokens
            self._unread.append(item)
            if len(self._unread) > MAX_UNREAD:
                self._unread = deque([_joined(self._unread)])
        self._arrived.set()
        if isinstance(item, GraftError) or item.finished:
            self._ended.set()
            if self._timer is not None:
                self._timer.cancel()

    def _expire(self, timeout: float) -> None:
        # The reader hears of it now, however long the step takes in which the engine is.
        self.receive(deadline_exceeded(timeout))
        self.abort()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended.is_set():
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()


def _receive_each(items: Iterable[tuple[RequestStream, RequestOutput | GraftError]]) -> None:
    for stream, item in items:
        stream.receive(item)


def deadline_exceeded(timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        "the request was not answered in time",
        got=f"a timeout of {timeout:g} seconds",
        do="allow more time, ask for fewer tokens, or try again when less is going on",
    )


def _joined(deltas: deque[RequestOutput]) -> RequestOutput:
    collector = OutputCollector()
    for delta in deltas:
        collector.add(delta)
    return collector.result()
