"""The asynchronous front end: the engine steps in a thread of its own, requests are awaited or streamed."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graftlm.adapters import Adapter, AdapterChoice, choice_name
from graftlm.adapters.files import folder_bytes
from graftlm.config import EngineConfig
from graftlm.engine.adapter_threads import AdapterThreads
from graftlm.engine.background_thread import background_thread
from graftlm.engine.base import Base
from graftlm.engine.completion_rate import CompletionRate
from graftlm.engine.engine import Engine
from graftlm.engine.executor import MovedStage, WorkerInfo
from graftlm.engine.job import Job
from graftlm.engine.memory import return_free_memory
from graftlm.engine.metrics import EngineNumbers, EngineState
from graftlm.engine.outputs import RequestFailure, RequestOutput
from graftlm.engine.prompt import Prompt, check_length
from graftlm.engine.request import Resumption
from graftlm.engine.request_stream import RequestStream, deadline_exceeded
from graftlm.engine.residency import ResidencyState
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.side_work import SideWork
from graftlm.engine.tenant import Tenant
from graftlm.errors import EngineClosed, EngineOverloaded, GraftError, InvalidRequest, StepFailed
from graftlm.models.heap import trim_heap
from graftlm.text import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Read = TypeVar("Read")


class AsyncLLM:
    """A base model with adapters, for servers. Same arguments as `LLM`; all methods belong to one event loop.

    Raises:
        ConfigurationError, CheckpointError, AdapterError: the engine cannot be built as asked.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Engine | None = Engine(EngineConfig(model=model, **options), wake=self.wake)
        # Adapters are read for the first time in threads of their own: those who wait must not take the threads in
        # which other requests are tokenised.
        self._checks = AdapterThreads("graft-checks")
        # So are grammars: compiling one can take seconds.
        self._compilations = background_thread("graft-grammars")
        self.created = int(time.time())
        self._streams: dict[str, RequestStream] = {}
        self._side_work: SideWork | None = None
        self._rate = CompletionRate(time.monotonic())
        self._accepting = True
        self._stop = False
        self._thread = threading.Thread(target=self._run_or_close, name="graft-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        return self._open().config

    @property
    def model_name(self) -> str:
        return self._open().model_name

    @property
    def max_model_len(self) -> int:
        return self._open().max_model_len

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """What has been loaded, by name, whether its weights are in memory now or not."""
        return self._open().adapters

    @property
    def residency(self) -> Mapping[str, ResidencyState]:
        """Of every adapter that answers, those in `adapter_dir` included, whether its weights are in memory."""
        return self._open().residency

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs, which it does until a shutdown is through."""
        return self._thread.is_alive()

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes that compute, when there are others than this one."""
        return self._open().workers

    @property
    def num_lost_workers(self) -> int:
        """Workers that died or did not answer, and were replaced."""
        return self._open().num_lost_workers

    @property
    def num_moves(self) -> int:
        """Times that a worker's layers went to another, or became others, though none was lost."""
        return self._open().num_moves

    async def drain(self, target: str) -> tuple[MovedStage, ...]:
        """Have a worker's layers, or a replica, or all of a node's, in other processes, and end those that had them.
        Requests go on while the layers are read there, and pause until what those had computed is computed again. A
        replica has half a minute for those that it has begun; what is left goes on elsewhere in the same way.

        Args:
            target: the id of a worker, a replica or a node, as `workers` has them; a node's may be cut short.

        Raises:
            ObjectNotFound: none of them has this id.
            DrainFailed: there is nowhere else to go; nothing has changed then.
            EngineClosed
        """
        return await asyncio.to_thread(self._open().drain, target, self._between_steps)

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._accepting and self.is_alive

    async def responds(self, *, within_seconds: float) -> bool:
        """Whether the engine gets through its step, and with it to what it was told, in this time."""
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        self._commands.put(lambda: _wake(loop, heard))
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), within_seconds)
        return heard.is_set()

    @property
    def state(self) -> EngineState:
        """How full the engine is now."""
        return self._open().state

    @property
    def requests(self) -> tuple[RequestStream, ...]:
        """Those that have not ended, waiting ones included."""
        return tuple(self._streams.values())

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    def read_metrics(self) -> tuple[EngineNumbers, EngineState]:
        """What was done so far, and how full the engine is. Also while it drains.

        Raises:
            EngineClosed
        """
        if self._engine is None:
            raise _closed()
        return self._engine.metrics.read(), self._engine.state

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        return self._open().core.num_free_blocks

    def resolve_model(self, model: str, *, may_use: Callable[[str], bool] = lambda name: True) -> str | None:
        """The adapter that a request's model name means; None for the base.

        Args:
            may_use: names for which it is false do not answer.

        Raises:
            ModelNotFound: lists the names that would have been answered.
            InvalidRequest: it looks like a weighted sum and is none.
        """
        return self._open().registry.resolve(model, may_use=may_use)

    async def tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """The tokenizer that serves an adapter, or the base.

        Raises:
            ModelNotFound, AdapterError
        """
        engine = self._open()
        await self._introduce(engine, adapter)
        return engine.tokenizer_of(adapter)

    async def tokenize(
        self, text: str, *, adapter: str | None = None, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a text, as a prompt of it would have.

        Args:
            add_special_tokens: with those that the tokenizer puts around every text (a BOS, say).

        Raises:
            ContextLengthExceeded: it is longer than any prompt; it is not tokenised then.
            InvalidRequest, ModelNotFound, AdapterError
        """
        check_length(text, self.max_model_len)
        tokenizer = await self.tokenizer_of(adapter)
        return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def detokenize(
        self, token_ids: Sequence[int], *, adapter: str | None = None, skip_special_tokens: bool = True
    ) -> str:
        """Text of token ids, special tokens left out unless they are wanted; an id beyond the vocabulary has none.

        Raises:
            ModelNotFound, AdapterError
        """
        decode = partial((await self.tokenizer_of(adapter)).decode, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(decode, token_ids)

    async def tokens_of(self, token_ids: Sequence[int], *, adapter: str | None = None) -> tuple[str, ...]:
        """Each id's entry in the vocabulary.

        Raises:
            ModelNotFound, AdapterError
        """
        token = (await self.tokenizer_of(adapter)).token
        return await asyncio.to_thread(lambda: tuple(map(token, token_ids)))

    async def apply_chat_template(
        self, messages: Sequence[Message], *, adapter: str | None = None, **options: Any
    ) -> tuple[int, ...]:
        """Token ids of a conversation, by the adapter's own chat template or the model's.

        Args:
            options: as for `Tokenizer.render_chat`: add_generation_prompt, continue_final_message, tools,
                template_variables.

        Raises:
            ContextLengthExceeded: its text is longer than any prompt; it is not tokenised then.
            InvalidRequest: there is no template, or it refuses the messages.
            ModelNotFound, AdapterError
        """
        encode = (await self.tokenizer_of(adapter)).encode_chat
        check = partial(check_length, max_len=self.max_model_len)
        return tuple(await asyncio.to_thread(partial(encode, messages, check=check, **options)))

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        adapter: AdapterChoice | None = None,
        timeout: float | None = None,
        tenant: Tenant | None = None,
        resume: Resumption | None = None,
    ) -> RequestStream:
        """Check a request completely, queue it, and return the stream of its deltas.

        Args:
            timeout: seconds from now after which the request is stopped wherever it is, and its stream ends with
                DeadlineExceeded.
            tenant: on whose account it runs; default: the adapter's.
            resume: which answers to go on with, and what they have so far; deltas are of what comes after.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError, EngineClosed
            EngineOverloaded: `max_queued_requests` are waiting.
            DeadlineExceeded: the prompt alone took that long to check.
        """
        if timeout is not None and not 0 < timeout < math.inf:
            raise InvalidRequest("timeout is not a time", param="timeout", got=timeout, allowed="positive seconds")
        engine = self._open()
        self._check_room(engine.config, params.n)
        begun = asyncio.get_running_loop().time()
        job = await self._make_job(engine, prompt, params, adapter, timeout, tenant, resume)
        try:
            if not self._accepting:
                raise _closed()
            self._check_room(engine.config, params.n)
        except GraftError:
            engine.discard(job)
            raise
        # Registered here and not by the engine's thread, so that a shutdown from now on knows of it.
        self._streams[job.job_id] = stream = RequestStream(job, self._abort)
        if timeout is not None:
            stream.expire_at(begun + timeout, timeout)
        self._commands.put(lambda: engine.core.add(job))
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        adapter: AdapterChoice | None = None,
        timeout: float | None = None,
    ) -> RequestOutput:
        """The complete answer to one prompt.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, EngineClosed, EngineOverloaded
            AdapterError, DeadlineExceeded, StepFailed: no answer came of it.
        """
        stream = await self.add_request(prompt, params, adapter=adapter, timeout=timeout)
        return await stream.collect()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        adapter: AdapterChoice | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The answer in deltas; closing the iterator aborts the request.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, EngineClosed, EngineOverloaded: before any delta.
            AdapterError: before any delta. DeadlineExceeded, StepFailed: at any time.
        """
        stream = await self.add_request(prompt, params, adapter=adapter, timeout=timeout)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> Adapter:
        """Load an adapter while requests run; they do not notice. As `LLM.load_adapter`.

        Args:
            replace: `name` may lead to another adapter until now; requests that were accepted finish with that one,
                whose memory returns with the last of them.

        Raises:
            AdapterError: a subclass says which file, field or tensor is at fault; nothing is changed then.
        """
        load = partial(self._open().load_adapter, name, path, replace=replace)
        return await self._check(load, folder_bytes(path))

    async def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Forget an adapter. Requests that run on it finish; its memory returns with the last of them.

        Args:
            force: end its requests at once, with the finish reason "abort"; its memory is back on return.

        Raises:
            ModelNotFound
        """
        engine = self._open()

        def unload() -> None:
            adapter = engine.unload_adapter(name)
            if force:
                self._commands.put(lambda: self._abort_users(adapter))

        await asyncio.to_thread(unload)
        if force:
            await self._commands_taken()
            await asyncio.to_thread(trim_heap)

    def check_adapter_name(self, name: str) -> None:
        """Raise unless an adapter may be loaded under `name`, in nobody's place.

        Raises:
            AdapterNameInvalid, AdapterNameTaken
        """
        self._open().registry.check_name(name)

    @property
    def whole_base(self) -> Base:
        """The base model, to be trained on beside the requests.

        Raises:
            ConfigurationError: it is not in this process.
        """
        return self._open().whole_base

    def do_beside(self, work: SideWork) -> None:
        """Let the engine's thread do something else too, between its steps and whenever it has none to do."""
        self._side_work = work
        self.wake()

    def wake(self) -> None:
        """Let the engine's thread look for work. From any thread."""
        self._commands.put(lambda: None)

    async def shutdown(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for at most `drain_seconds`, abort the rest, free everything."""
        self._accepting = False
        with suppress(TimeoutError):
            running = [stream.ended() for stream in list(self._streams.values())]
            await asyncio.wait_for(asyncio.gather(*running), drain_seconds)
        self._stop = True
        self.wake()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._checks.close)
        await asyncio.to_thread(self._compilations.shutdown)
        engine, self._engine = self._engine, None
        self._take_commands(wait=False)
        if engine is not None:
            await asyncio.to_thread(engine.close)
        del engine
        return_free_memory()

    def _open(self) -> Engine:
        if self._engine is None or not self._accepting:
            raise _closed()
        return self._engine

    def _check_room(self, config: EngineConfig, num_answers: int) -> None:
        unfinished = sum(stream.num_answers for stream in list(self._streams.values()))
        limit = config.max_num_seqs * config.num_replicas + config.max_queued_requests
        # Whatever the limit, one request alone may ask for more answers than that.
        if unfinished and (excess := unfinished + num_answers - limit) > 0:
            raise EngineOverloaded(
                "too many requests are waiting",
                got=f"{unfinished} unfinished answers",
                allowed=f"max_num_seqs, of all replicas, + max_queued_requests = {limit}"
                if config.replicas
                else f"max_num_seqs + max_queued_requests = {limit}",
                do="try again later",
                retry_after_seconds=self._rate.seconds_until(excess, time.monotonic()),
            )

    async def _make_job(
        self,
        engine: Engine,
        prompt: Prompt,
        params: SamplingParams,
        adapter: AdapterChoice | None,
        timeout: float | None,
        tenant: Tenant | None,
        resume: Resumption | None,
    ) -> Job:
        chosen = None if adapter is None else choice_name(adapter)

        async def make() -> Job:
            await self._introduce(engine, chosen)
            if not engine.has_grammar(params, chosen):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._compilations, engine.compile_grammar, params, chosen)
            # Tokenising a long text takes a while; the event loop must not wait for it.
            return await asyncio.to_thread(engine.make_job, prompt, params, chosen, tenant, resume)

        making = asyncio.ensure_future(make())
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(making)
        except (TimeoutError, asyncio.CancelledError) as gave_up:
            making.add_done_callback(lambda made: engine.discard(made.result()) if made.exception() is None else None)
            if timeout is not None and isinstance(gave_up, TimeoutError):
                raise deadline_exceeded(timeout) from None
            raise

    async def _check(self, read: Callable[[], Read], num_bytes: int | None) -> Read:
        """Run what reads an adapter of this size for the first time; those whose turn comes after a shutdown are
        refused."""

        def read_if_open() -> Read:
            self._open()
            return read()

        return await asyncio.wrap_future(self._checks.submit(num_bytes, read_if_open))

    async def _introduce(self, engine: Engine, adapter: str | None) -> None:
        """Have what lies in the adapter folder read before it is used."""
        if not engine.knows(adapter):
            await self._check(partial(engine.introduce, adapter), engine.bytes_to_introduce(adapter))

    def _abort_users(self, adapter: Adapter) -> None:
        if self._engine is not None:
            self._deliver(self._engine.core.abort_users(adapter))

    async def _commands_taken(self) -> None:
        """Wait until the engine's thread has done what it was told so far."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self._commands.put(lambda: _wake(loop, done))
        # Once it has ended, `shutdown` takes what it left.
        if self._thread.is_alive():
            await done.wait()

    def _between_steps(self, act: Callable[[], None]) -> None:
        """Have the engine's thread do something, from another one, and wait for it.

        Raises:
            EngineClosed
        """
        done = threading.Event()

        def act_and_tell() -> None:
            act()
            done.set()

        self._commands.put(act_and_tell)
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise _closed()

    def _abort(self, request_id: str) -> None:
        def abort() -> None:
            if self._engine is not None and (delta := self._engine.core.abort(request_id)) is not None:
                self._deliver([delta])

        self._commands.put(abort)

    def _deliver(self, items: Iterable[RequestOutput | RequestFailure]) -> None:
        RequestStream.put([self._addressed(item) for item in items])

    def _addressed(self, item: RequestOutput | RequestFailure) -> tuple[RequestStream, RequestOutput | GraftError]:
        # Out of the books before the client hears of it.
        if isinstance(item, RequestFailure):
            return self._streams.pop(item.request_id), item.error
        if not item.finished:
            return self._streams[item.request_id], item
        stream = self._streams.pop(item.request_id)
        self._rate.record(stream.num_answers, time.monotonic())
        return stream, item

    def _end_with(self, request_ids: Iterable[str], error: GraftError) -> None:
        RequestStream.put([(self._streams.pop(request_id), error) for request_id in request_ids])

    def _run_or_close(self) -> None:
        """Nobody is left waiting, even if the thread ends by something that nobody foresaw."""
        try:
            self._run()
        except Exception:
            logger.exception("the engine's thread has failed; nothing is computed any more")
            self._accepting = False
            self._end_with(list(self._streams), EngineClosed("the engine has failed", do="restart it"))

    def _run(self) -> None:
        """The engine's thread: take commands, step while there is work."""
        engine = self._engine
        assert engine is not None
        while not self._stop:
            work = self._side_work
            has_side_work = work is not None and work.has_work
            is_idle = not engine.core.has_work or engine.core.waits_for_loads
            self._take_commands(wait=is_idle and not has_side_work)
            if engine.core.has_work:
                self._step(engine)
            if work is not None and work.has_work and not self._stop:
                work.step(is_serving=engine.core.has_work and not engine.core.waits_for_loads)
        self._take_commands(wait=False)
        self._fail_all(engine, EngineClosed("the engine was shut down before the request finished"))

    def _take_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step(self, engine: Engine) -> None:
        try:
            self._deliver(engine.core.step())
        except Exception:
            # The bookkeeping itself broke: nobody knows any more who was in the step. The engine goes on with empty
            # hands.
            logger.exception("a step could not be planned; all requests are given up")
            self._fail_all(engine, StepFailed("the engine failed while computing this request", do="send it again"))

    def _fail_all(self, engine: Engine, error: GraftError) -> None:
        self._end_with(engine.core.abort_all(), error)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
        loop.call_soon_threadsafe(event.set)


def _closed() -> EngineClosed:
    return EngineClosed("the engine is shutting down")
