"""From the engine's deltas to a reply, whole or as server-sent events; and the end of the work when the client is
gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.outputs import RequestOutput
from graftlm.engine.prompt import Prompt as EnginePrompt
from graftlm.engine.request_stream import RequestStream
from graftlm.engine.sampling_params import SamplingParams
from graftlm.errors import ContextLengthExceeded, EngineClosed
from graftlm.server.callers import caller_of
from graftlm.server.errors import ClientGone, error_reply, log_failure
from graftlm.server.prompts import Prompt
from graftlm.server.structured_fields import blamed_on
from graftlm.server.work import work_of

Chunks = AsyncGenerator[Mapping[str, Any]]


async def submit(
    request: Request,
    llm: AsyncLLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    adapter: str | None,
    timeout: float | None,
    if_too_long: SamplingParams | None = None,
    form_field: str | None = None,
) -> list[RequestStream]:
    """Hand all prompts to the engine at once, so that they run in one batch; or none, when one of them is refused. They
    run on the account of the request's caller, and are noted as its work.

    Args:
        adapter: as `resolve_model` gave it.
        timeout: seconds that each of them has.
        if_too_long: for a prompt that leaves no room for what `params` asks for.
        form_field: the field that asked for `params.structured`.

    Raises:
        InvalidRequest, ModelNotFound, EngineOverloaded: what the engine says of the first prompt it refuses.
    """

    tenant = caller_of(request).tenant

    async def add(prompt: Prompt) -> RequestStream:
        entry: EnginePrompt = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        try:
            return await llm.add_request(entry, params, adapter=adapter, timeout=timeout, tenant=tenant)
        except ContextLengthExceeded:
            if if_too_long is None:
                raise
            return await llm.add_request(entry, if_too_long, adapter=adapter, timeout=timeout, tenant=tenant)

    results = await asyncio.gather(*map(add, prompts), return_exceptions=True)
    streams = [result for result in results if isinstance(result, RequestStream)]
    refusals = [result for result in results if isinstance(result, BaseException)]
    if refusals:
        abort(streams)
        raise blamed_on(form_field, refusals[0])
    work_of(request).add(streams)
    return streams


def abort(streams: Sequence[RequestStream]) -> None:
    """Give up what is still running; streams that are through do not mind."""
    for stream in streams:
        stream.abort()


@contextmanager
def given_up_on_error(streams: Sequence[RequestStream]) -> Iterator[None]:
    """For what must still succeed before there is a reply to carry the streams."""
    try:
        yield
    except BaseException:
        abort(streams)
        raise


async def collect(request: Request, streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The complete outputs.

    Raises:
        ClientGone: the client went away first; the work is stopped.
        EngineClosed, StepFailed, DeadlineExceeded: there is no answer.
    """
    answers = asyncio.gather(*(stream.collect() for stream in streams))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((answers, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise ClientGone
        outputs = await answers
    finally:
        abort(streams)
        leaving.cancel()
        answers.cancel()
        await asyncio.gather(answers, leaving, return_exceptions=True)
    for output in outputs:
        check_not_aborted(output)
    return outputs


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Deltas of all streams as they come, each with its stream's place in the list."""
    if len(streams) == 1:
        # Nearly always: a task for each delta would be a third of what it costs.
        async for delta in streams[0]:
            check_not_aborted(delta)
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(future)
                try:
                    delta = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
                check_not_aborted(delta)
                yield index, delta
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def begun(request: Request, streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Wait for the first delta; then `merged` with nothing missing. What fails until then can still be told by the
    status of the reply.

    Raises:
        ClientGone: the client went away first; the work is stopped.
        EngineClosed, StepFailed, DeadlineExceeded, AdapterError: nothing comes; the work is stopped.
    """
    deltas = merged(streams)
    first = asyncio.ensure_future(anext(deltas))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((first, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientGone
        delta = await first
    except BaseException:
        abort(streams)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await deltas.aclose()
        raise
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    return _resumed(delta, deltas)


async def _resumed(
    delta: tuple[int, RequestOutput], rest: AsyncGenerator[tuple[int, RequestOutput]]
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    async with aclosing(rest):
        yield delta
        async for later in rest:
            yield later


def check_not_aborted(output: RequestOutput) -> None:
    """Raises EngineClosed: part of an answer must not pass for the answer."""
    if any(answer.finish_reason == "abort" for answer in output.outputs):
        raise EngineClosed("the engine stopped before the answer was complete", do="send the request again")


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, by [DONE], by an error or because the client left, the requests
    behind it are stopped.

    Args:
        encode: makes events of the chunks, and of what goes wrong between them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Chunks,
        streams: Sequence[RequestStream],
        request: Request,
        *,
        encode: Callable[[Chunks, Request], AsyncGenerator[bytes]] | None = None,
    ) -> None:
        self._events = (encode or _events)(chunks, request)
        self._streams = streams
        super().__init__(self._events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            abort(self._streams)
            await self._events.aclose()


async def typed_events(chunks: Chunks, request: Request) -> AsyncGenerator[bytes]:
    """Events that are named by the type of their chunk. What goes wrong is a chunk too, and there is no [DONE]."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield f"event: {chunk['type']}\n".encode() + _event(chunk)


async def _events(chunks: Chunks, request: Request) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield _event(chunk)
    except Exception as error:
        # The status line is long gone: the failure is an event, and the stream ends without [DONE].
        log_failure(error, request)
        reply = error_reply(error, request)
        reply.note(request)
        yield _event(reply.body)
        return
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
