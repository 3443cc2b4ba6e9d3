"""POST /v1/responses. Nothing is stored: `previous_response_id` is refused, a conversation is sent as a whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.outputs import OutputCollector, RequestOutput, TokenLogprob
from graftlm.server.callers import resolve_model
from graftlm.server.errors import error_reply, log_failure
from graftlm.server.logprobs import chat_logprobs
from graftlm.server.replies import TokenCount
from graftlm.server.schemas import ResponseRequest
from graftlm.server.streaming import EventStream, begun, collect, submit, typed_events


def response_routes(llm: AsyncLLM, *, request_timeout: float | None) -> APIRouter:
    """Args: request_timeout: most seconds that a request may take."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        adapter = resolve_model(request, llm, body.model)
        params = body.sampling_params()
        prompt_token_ids = await llm.apply_chat_template(body.messages(), adapter=adapter)
        timeout = body.timeout_within(request_timeout)
        streams = await submit(
            request, llm, [list(prompt_token_ids)], params, adapter=adapter, timeout=timeout, form_field="text"
        )
        writer = ResponseWriter(body)
        if body.stream:
            deltas = await begun(request, streams)
            return EventStream(writer.events(deltas, request), streams, request, encode=typed_events)
        [output] = await collect(request, streams)
        return JSONResponse(writer.ended(output))

    return router


class ResponseWriter:
    """Turns one answer, complete or in deltas, into a response object or the events that lead up to it."""

    def __init__(self, body: ResponseRequest) -> None:
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._next_number = 0

    def ended(self, output: RequestOutput) -> dict[str, Any]:
        """The object of a complete answer. One that was cut at its limit is incomplete."""
        [answer] = output.outputs
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        item = self._item(status, [self._part(answer.text, answer.logprobs or ())])
        count = TokenCount()
        count.add(output)
        usage = count.usage
        return {
            **self._response(status, [item]),
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

    async def events(
        self, deltas: AsyncGenerator[tuple[int, RequestOutput]], request: Request
    ) -> AsyncGenerator[dict[str, Any]]:
        """What OpenAI streams, in its order. A failure on the way is the last event, `response.failed`."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        collector = OutputCollector()
        place = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        try:
            yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            yield self._event("response.content_part.added", **place, part=self._part("", ()))
            async with aclosing(deltas):
                async for _, delta in deltas:
                    collector.add(delta)
                    [answer] = delta.outputs
                    if answer.text or answer.logprobs:
                        logprobs = _rated(answer.logprobs or ())
                        yield self._event("response.output_text.delta", **place, delta=answer.text, logprobs=logprobs)
        except Exception as error:
            log_failure(error, request)
            reply = error_reply(error, request)
            reply.note(request)
            cause = {"code": "server_error", "message": reply.message}
            yield self._event("response.failed", response={**self._response("failed", []), "error": cause})
            return
        response = self.ended(collector.result())
        [item] = response["output"]
        [part] = item["content"]
        yield self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

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
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": _rated(logprobs)}


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    asked = None if body.text is None else body.text.format
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


def _rated(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """As in chat, but that the bytes of a part of a character, which are not known, are an empty list."""

    def listed(rated: Any) -> dict[str, Any]:
        return {**rated, "bytes": rated["bytes"] or []}

    return [
        {**listed(entry), "top_logprobs": [listed(other) for other in entry["top_logprobs"]]}
        for entry in chat_logprobs(tokens)["content"]
    ]
