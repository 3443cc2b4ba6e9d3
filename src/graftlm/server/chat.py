"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.outputs import CompletionOutput, RequestOutput
from graftlm.server.callers import resolve_model
from graftlm.server.json_body import JsonRoute
from graftlm.server.logprobs import chat_logprobs, prompt_logprobs
from graftlm.server.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    Envelope,
    TokenCount,
)
from graftlm.server.schemas import ChatRequest
from graftlm.server.streaming import EventStream, begun, collect, submit
from graftlm.server.tool_use import ToolAnswer, ToolUse, tool_use, with_names
from graftlm.text.tool_calls import ToolCallFormat


def chat_routes(llm: AsyncLLM, *, request_timeout: float | None, tool_call_format: ToolCallFormat | None) -> APIRouter:
    """Args:
    request_timeout: most seconds that a request may take.
    tool_call_format: how the model writes calls; None to go by chat templates.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        adapter = resolve_model(request, llm, body.model)
        params = body.sampling_params()
        tools = tool_use(
            body,
            await llm.tokenizer_of(adapter),
            tool_call_format,
            answer=params.structured,
            form_field=body.form_field,
        )
        if tools is not None:
            params = tools.params(params)
        prompt_token_ids = await llm.apply_chat_template(
            with_names([message.for_template() for message in body.messages]),
            adapter=adapter,
            tools=None if tools is None else tools.definitions,
            **body.template_options(),
        )
        streams = await submit(
            request,
            llm,
            [list(prompt_token_ids)],
            params,
            adapter=adapter,
            timeout=body.timeout_within(request_timeout),
            form_field=body.form_field or "tools",
        )
        if body.stream:
            envelope = Envelope(prefix="chatcmpl", kind="chat.completion.chunk", model=body.model)
            deltas = await begun(request, streams)
            return EventStream(_chunks(envelope, body, deltas, tools, num_choices=params.n), streams, request)
        envelope = Envelope(prefix="chatcmpl", kind="chat.completion", model=body.model)
        [output] = await collect(request, streams)
        count = TokenCount()
        count.add(output)
        choices = [_choice(answer, body, tools) for answer in output.outputs]
        return JSONResponse(envelope.holding(choices, usage=count.usage, **_prompt_details(output, body)))

    return router


def _prompt_details(output: RequestOutput, body: ChatRequest) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if body.prompt_logprobs is not None:
        details["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), num_top=body.prompt_logprobs)
    if body.return_token_ids:
        details["prompt_token_ids"] = list(output.prompt_token_ids)
    return details


def _choice(answer: CompletionOutput, body: ChatRequest, tools: ToolUse | None) -> ChatChoice:
    message: ChatMessage = {"role": "assistant", "content": answer.text}
    finish_reason: ChatFinishReason | None = answer.finish_reason
    if tools is not None:
        read = tools.answer()
        content, calls = read.whole(answer.text)
        finish_reason = read.finish_reason(answer.finish_reason)
        if calls:
            message = {"role": "assistant", "content": content or None, "tool_calls": calls}
    choice: ChatChoice = {
        "index": answer.index,
        "message": message,
        "logprobs": None if answer.logprobs is None else chat_logprobs(answer.logprobs),
        "finish_reason": finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
    return choice


async def _chunks(
    envelope: Envelope,
    body: ChatRequest,
    deltas: AsyncGenerator[tuple[int, RequestOutput]],
    tools: ToolUse | None,
    *,
    num_choices: int,
) -> AsyncGenerator[dict[str, Any]]:
    count = TokenCount()
    readers = {} if tools is None else {index: tools.answer() for index in range(num_choices)}
    no_usage: dict[str, Any] = {"usage": None} if body.include_usage else {}
    has_shown_prompt = False
    for index in range(num_choices):
        yield envelope.holding([_opening(index)], **no_usage)
    async with aclosing(deltas):
        async for _, delta in deltas:
            count.add(delta)
            for answer in delta.outputs:
                choice = _chunk_choice(answer, body, readers.get(answer.index))
                if choice["delta"] or choice["finish_reason"] or choice["logprobs"] or body.return_token_ids:
                    prompt = {} if has_shown_prompt else _prompt_details(delta, body)
                    has_shown_prompt = True
                    yield envelope.holding([choice], **no_usage, **prompt)
    if body.include_usage:
        yield envelope.holding([], usage=count.usage)


def _opening(index: int) -> ChatChunkChoice:
    delta: ChatDelta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _chunk_choice(answer: CompletionOutput, body: ChatRequest, reader: ToolAnswer | None) -> ChatChunkChoice:
    delta: ChatDelta = {"content": answer.text} if answer.text else {}
    finish_reason: ChatFinishReason | None = answer.finish_reason
    if reader is not None:
        piece = reader.push(answer.text, is_last=answer.finish_reason is not None)
        finish_reason = reader.finish_reason(answer.finish_reason)
        delta = {"content": piece.content} if piece.content else {}
        if piece.tool_calls:
            delta["tool_calls"] = piece.tool_calls
    choice: ChatChunkChoice = {
        "index": answer.index,
        "delta": delta,
        "logprobs": None if answer.logprobs is None else chat_logprobs(answer.logprobs),
        "finish_reason": finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
    return choice
