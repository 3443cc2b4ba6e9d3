"""POST /v1/responses. Nothing is stored: `previous_response_id` is refused, a conversation is sent as a whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.outputs import FinishReason, RequestOutput
from graftlm.server.callers import resolve_model
from graftlm.server.errors import error_reply, log_failure
from graftlm.server.json_body import JsonRoute
from graftlm.server.replies import TokenCount
from graftlm.server.response_items import ResponseItems
from graftlm.server.schemas import ResponseRequest
from graftlm.server.streaming import EventStream, begun, collect, submit, typed_events
from graftlm.server.tool_use import ToolUse, tool_use, with_names
from graftlm.text.tool_calls import ToolCallFormat


def response_routes(
    llm: AsyncLLM, *, request_timeout: float | None, tool_call_format: ToolCallFormat | None
) -> APIRouter:
    """Args:
    request_timeout: most seconds that a request may take.
    tool_call_format: how the model writes calls; None to go by chat templates.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        adapter = resolve_model(request, llm, body.model)
        params = body.sampling_params()
        fields = body.tools_as_in_chat()
        tools = tool_use(
            fields, await llm.tokenizer_of(adapter), tool_call_format, answer=params.structured, form_field="text"
        )
        if tools is not None:
            body.check_beside_tools()
            params = tools.params(params)
        prompt_token_ids = await llm.apply_chat_template(
            with_names(body.messages()), adapter=adapter, tools=None if tools is None else tools.definitions
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
        writer = ResponseWriter(body, tools)
        if body.stream:
            deltas = await begun(request, streams)
            return EventStream(writer.events(deltas, request), streams, request, encode=typed_events)
        [output] = await collect(request, streams)
        return JSONResponse(writer.whole(output))

    return router


class ResponseWriter:
    """Turns one answer, complete or in deltas, into a response object or the events that lead up to it."""

    def __init__(self, body: ResponseRequest, tools: ToolUse | None) -> None:
        self._body = body
        self._items = ResponseItems(tools)
        self._count = TokenCount()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._next_number = 0

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The object of a complete answer."""
        [answer] = output.outputs
        self._count.add(output)
        self._items.push(answer)
        return self._ended(answer.finish_reason)

    async def events(
        self, deltas: AsyncGenerator[tuple[int, RequestOutput]], request: Request
    ) -> AsyncGenerator[dict[str, Any]]:
        """What OpenAI streams, in its order. A failure on the way is the last event, `response.failed`."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        finish_reason: FinishReason | None = None
        try:
            async with aclosing(deltas):
                async for _, delta in deltas:
                    self._count.add(delta)
                    [answer] = delta.outputs
                    finish_reason = answer.finish_reason
                    for kind, content in self._items.push(answer):
                        yield self._event(f"response.{kind}", **content)
        except Exception as error:
            log_failure(error, request)
            reply = error_reply(error, request)
            reply.note(request)
            cause = {"code": "server_error", "message": reply.message}
            yield self._event("response.failed", response={**self._response("failed", []), "error": cause})
            return
        response = self._ended(finish_reason)
        yield self._event(f"response.{response['status']}", response=response)

    def _ended(self, finish_reason: FinishReason | None) -> dict[str, Any]:
        """The object of an answer that has ended. One that was cut at its limit is incomplete."""
        is_cut = finish_reason == "length"
        usage = self._count.usage
        return {
            **self._response("incomplete" if is_cut else "completed", self._items.output),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _event(self, kind: str, **content: object) -> dict[str, Any]:
        number = self._next_number
        self._next_number += 1
        return {"type": kind, "sequence_number": number, **content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": body.model,
            "output": output,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _text_format(body)},
            "tool_choice": _tool_choice(body),
            "tools": [tool.model_dump(exclude_defaults=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    asked = None if body.text is None else body.text.format
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


def _tool_choice(body: ResponseRequest) -> str | dict[str, Any]:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()
