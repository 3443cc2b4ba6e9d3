"""A whole engine that takes requests from a replica set. Knows nothing of processes, nor of other replicas."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from graftlm.config import EngineConfig
from graftlm.distributed.messages import AdapterPart, AdapterRecipe
from graftlm.distributed.replica_messages import (
    ReplicaDelta,
    ReplicaEvent,
    ReplicaFailure,
    ReplicaLoad,
    ReplicaNews,
    ReplicaRequest,
    ReplicaStatus,
)
from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.executor import MovedStage, WorkerWork
from graftlm.engine.request_stream import RequestStream
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.tenant import Tenant
from graftlm.errors import AdapterChanged, AdapterError, EngineClosed, GraftError, StepFailed
from graftlm.routing.costs import StepCosts
from graftlm.routing.worker_table import WorkerReport

logger = logging.getLogger(__name__)

# Without news a replica still says that often that it is there.
HEARTBEAT_SECONDS = 1.0
# With news it says that often how it is.
STATUS_SECONDS = 0.2
# Of the request that tells what a step takes.
_MEASURED_PROMPT, _MEASURED_TOKENS = 64, 4
# Sequences and adapters are measured by nobody yet: what one more of them adds to a step.
_ROW_SHARE = 0.05


class Replica:
    """An `AsyncLLM` in which adapters have their digests for names. All methods belong to one event loop.

    Raises:
        ConfigurationError, CheckpointError: the engine cannot be built.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._llm = AsyncLLM(**vars(config))
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, RequestStream] = {}
        self._events: list[ReplicaEvent] = []
        self._news = asyncio.Event()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._uses: Counter[str] = Counter()
        self._naming = asyncio.Lock()
        self._num_accepted = 0
        self._num_ended = 0
        self._told_at = 0.0
        self._costs = StepCosts()
        self._load_seconds: list[float] = []

    async def measure(self) -> None:
        """See what a step takes, with nothing beside it."""
        length = min(_MEASURED_PROMPT, self._llm.max_model_len - _MEASURED_TOKENS)
        stream = await self._llm.add_request(
            {"prompt_token_ids": [0] * max(1, length)},
            SamplingParams(max_tokens=_MEASURED_TOKENS, temperature=0, ignore_eos=True),
            # Nobody else is to find it in the cache.
            tenant=Tenant(name="", cache_salt=uuid.uuid4().hex),
        )
        await stream.collect()
        times = stream.timings
        assert times.begun is not None
        assert times.first_token is not None
        assert times.ended is not None
        step = (times.ended - times.first_token) / (_MEASURED_TOKENS - 1)
        self._costs = StepCosts(
            step_seconds=step,
            row_seconds=_ROW_SHARE * step,
            prompt_token_seconds=max(0.0, times.first_token - times.begun - step) / length,
            adapter_seconds=_ROW_SHARE * step,
        )

    def submit(self, request: ReplicaRequest) -> None:
        """Take a request; what becomes of it is among the news."""
        self._num_accepted += 1
        self._uses.update(_digests(request))
        task = asyncio.get_running_loop().create_task(self._run(request))
        self._tasks[request.job_id] = task
        task.add_done_callback(lambda _: self._end(request))

    def abort(self, job_id: str) -> None:
        """Give a request up. Unknown ones are fine."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()

    async def poll(self, *, forget: Sequence[str], prepare: Sequence[AdapterRecipe]) -> ReplicaNews:
        """The news as soon as there are any, or after `HEARTBEAT_SECONDS`.

        Args:
            forget: digests that nobody needs; those of requests that run here stay. prepare: adapters that will be
                asked for, to be read if they have not been.
        """
        async with self._naming:
            for digest in forget:
                if not self._uses[digest] and digest in self._llm.adapters:
                    await self._llm.unload_adapter(digest)
        for recipe in prepare:
            for part in recipe.parts:
                if part.digest not in self._llm.adapters:
                    self._start_load(part)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), HEARTBEAT_SECONDS)
        self._news.clear()
        events, self._events = self._events, []
        return ReplicaNews(events=tuple(events), status=self._status())

    async def drain(self, target: str) -> tuple[MovedStage, ...]:
        """Have layers leave one of its workers, or a node. As `AsyncLLM.drain`."""
        return await self._llm.drain(target)

    async def close(self) -> None:
        """End the engine, and what it still computes."""
        await self._llm.shutdown()

    def _status(self) -> ReplicaStatus | None:
        now = time.monotonic()
        if now - self._told_at < STATUS_SECONDS:
            return None
        self._told_at = now
        numbers, state = self._llm.read_metrics()
        unread = [stream for stream in self._streams.values() if stream.timings.first_token is None]
        return ReplicaStatus(
            report=WorkerReport(
                num_requests=len(self._tasks),
                pending_prompt_tokens=sum(len(stream.prompt_token_ids) for stream in unread),
                adapters=state.resident,
                num_loading=len(self._loads),
                free_cache_tokens=state.num_free_blocks * self._config.block_size,
                free_adapter_bytes=self._config.adapter_memory_bytes - state.adapter_bytes,
                costs=self._costs,
                num_accepted=self._num_accepted,
                num_ended=self._num_ended,
            ),
            load=ReplicaLoad(
                num_running=state.num_running,
                num_waiting=state.num_waiting,
                num_free_blocks=state.num_free_blocks,
                num_blocks=state.num_blocks,
                adapter_bytes=state.adapter_bytes,
            ),
            work=WorkerWork(
                num_steps=sum(numbers.steps.counts),
                compute_seconds=numbers.steps.total,
                adapter_bytes=state.adapter_bytes,
            ),
            known=frozenset(self._llm.adapters),
            workers=self._llm.workers,
            num_lost_workers=self._llm.num_lost_workers,
            num_moves=self._llm.num_moves,
        )

    async def _run(self, request: ReplicaRequest) -> None:
        try:
            await self._answer(request)
        except GraftError as error:
            told = _named(error, request.adapter) if isinstance(error, AdapterError) else error
            self._say(ReplicaFailure(job_id=request.job_id, error=told, is_fatal=isinstance(error, EngineClosed)))
        except Exception:
            logger.exception("request %s has failed", request.job_id)
            broken = StepFailed("the engine failed while computing this request", do="send it again")
            self._say(ReplicaFailure(job_id=request.job_id, error=broken, is_fatal=False))

    def _end(self, request: ReplicaRequest) -> None:
        """Whatever became of it, and also if it never began."""
        self._uses.subtract(_digests(request))
        self._streams.pop(request.job_id, None)
        del self._tasks[request.job_id]
        self._num_ended += 1

    async def _answer(self, request: ReplicaRequest) -> None:
        adapter = None
        if request.adapter is not None:
            for part in request.adapter.parts:
                await self._know(part)
            adapter = _choice(request.adapter)
        stream = await self._llm.add_request(
            {"prompt_token_ids": request.prompt_token_ids},
            request.params,
            adapter=adapter,
            tenant=request.tenant,
            resume=request.resume,
        )
        self._streams[request.job_id] = stream
        try:
            async for delta in stream:
                begun = stream.timings.begun
                self._say(
                    ReplicaDelta(
                        job_id=request.job_id,
                        answers=delta.outputs,
                        num_cached_tokens=delta.num_cached_tokens,
                        prompt_logprobs=delta.prompt_logprobs,
                        computing_seconds=0.0 if begun is None else time.perf_counter() - begun,
                    )
                )
        finally:
            stream.abort()

    async def _know(self, part: AdapterPart) -> None:
        """Have an adapter read, once for all that wait for it."""
        async with self._naming:
            # What is being forgotten is gone by now, and what is in use will not be.
            if part.digest in self._llm.adapters:
                return
        # Whoever waits may give up; the others still want it.
        await asyncio.shield(self._start_load(part))

    def _start_load(self, part: AdapterPart) -> asyncio.Task[None]:
        load = self._loads.get(part.digest)
        if load is None:
            load = asyncio.get_running_loop().create_task(self._load(part))
            load.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._loads[part.digest] = load
        return load

    async def _load(self, part: AdapterPart) -> None:
        begun = time.perf_counter()
        try:
            adapter = await self._llm.load_adapter(part.digest, part.source)
            self._note_load(time.perf_counter() - begun)
            if adapter.digest != part.digest:
                await self._llm.unload_adapter(part.digest)
                raise AdapterChanged(
                    "its files are not those that were loaded", do="load it again, or put the old files back"
                )
        finally:
            del self._loads[part.digest]

    def _note_load(self, seconds: float) -> None:
        """The last few say what the next will take."""
        self._load_seconds = [*self._load_seconds[-7:], seconds]
        mean = sum(self._load_seconds) / len(self._load_seconds)
        self._costs = replace(self._costs, load_seconds=mean, load_byte_seconds=0.0)

    def _say(self, event: ReplicaEvent) -> None:
        self._events.append(event)
        self._news.set()


def _digests(request: ReplicaRequest) -> tuple[str, ...]:
    return () if request.adapter is None else tuple(part.digest for part in request.adapter.parts)


def _choice(recipe: AdapterRecipe) -> str | dict[str, float]:
    weights: dict[str, float] = {}
    for part in recipe.parts:
        if part.weight is not None:
            # Two names may lead to the same content.
            weights[part.digest] = weights.get(part.digest, 0.0) + part.weight
    return weights or recipe.parts[0].digest


def _named(error: AdapterError, recipe: AdapterRecipe | None) -> AdapterError:
    """The same error, with adapters called as those who ask for them do, and without paths."""

    def shown(text: object) -> str | None:
        if text is None:
            return None
        told = str(text)
        for part in () if recipe is None else recipe.parts:
            for secret in (part.digest, str(part.source), str(part.source.parent)):
                told = told.replace(secret, part.name)
        return told

    return type(error)(shown(error.what) or "", got=shown(error.got), allowed=shown(error.allowed), do=shown(error.do))
