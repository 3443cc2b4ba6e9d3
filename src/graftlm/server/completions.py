"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from graftlm.server.callers import resolve_model
from graftlm.server.json_body import JsonRoute
from graftlm.server.logprobs import completion_logprobs, prompt_logprobs
from graftlm.server.prompts import Prompt
from graftlm.server.replies import CompletionChoice, Envelope, TokenCount
from graftlm.server.schemas import CompletionRequest
from graftlm.server.streaming import EventStream, begun, collect, given_up_on_error, submit


def completion_routes(llm: AsyncLLM, *, request_timeout: float | None) -> APIRouter:
    """Args: request_timeout: most seconds that a request may take."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        adapter = resolve_model(request, llm, body.model)
        params = body.sampling_params()
        # OpenAI's default is a ceiling: a prompt that leaves less of the context gets what it leaves.
        rest = replace(params, max_tokens=None) if body.max_tokens is None else None
        timeout = body.timeout_within(request_timeout)
        prompts = body.prompt
        if body.add_special_tokens is False:
            prompts = tuple([await _bare(llm, prompt, adapter) for prompt in prompts])
        streams = await submit(
            request,
            llm,
            prompts,
            params,
            adapter=adapter,
            timeout=timeout,
            if_too_long=rest,
            form_field=body.form_field,
        )
        with given_up_on_error(streams):
            # Only now are the ids known to be tokens of this model.
            echoes = [await _text(llm, prompt, adapter) if body.echo else "" for prompt in body.prompt]
        writers = [ChoiceWriter(body, first_index=number * params.n, echo=echo) for number, echo in enumerate(echoes)]
        envelope = Envelope(prefix="cmpl", kind="text_completion", model=body.model)
        if body.stream:
            deltas = await begun(request, streams)
            return EventStream(_chunks(envelope, body, writers, deltas), streams, request)
        outputs = await collect(request, streams)
        count = TokenCount()
        choices: list[CompletionChoice] = []
        for writer, output in zip(writers, outputs, strict=True):
            count.add(output)
            choices += writer.choices(output)
        return JSONResponse(envelope.holding(choices, usage=count.usage))

    return router


class ChoiceWriter:
    """Turns the outputs of one prompt, complete or in deltas, into choices; knows what each has said so far."""

    def __init__(self, body: CompletionRequest, *, first_index: int, echo: str) -> None:
        self._first_index = first_index
        self._echo = echo
        self._num_top = body.logprobs
        self._num_prompt_top = body.prompt_logprobs
        self._echoes_logprobs = bool(body.echo)
        self._shows_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs: Sequence[TokenLogprob] = ()
        self._text_lengths: dict[int, int] = {}

    def choices(self, output: RequestOutput) -> list[CompletionChoice]:
        # They come with the first delta, and every answer begins with them.
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        return [self._choice(answer, output.prompt_token_ids) for answer in output.outputs]

    def _choice(self, answer: CompletionOutput, prompt_token_ids: Sequence[int]) -> CompletionChoice:
        tokens: list[TokenLogprob] = list(answer.logprobs or ())
        text = answer.text
        start = self._text_lengths.get(answer.index, 0)
        is_first = answer.index not in self._text_lengths
        if is_first:
            if self._echoes_logprobs:
                tokens = [*self._prompt_logprobs, *tokens]
            text = self._echo + text
        self._text_lengths[answer.index] = start + len(text)
        logprobs = None
        if self._num_top is not None:
            logprobs = completion_logprobs(tokens, text, start=start, num_top=self._num_top)
        choice: CompletionChoice = {
            "index": self._first_index + answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._num_prompt_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, num_top=self._num_prompt_top)
        if self._shows_token_ids:
            choice["token_ids"] = list(answer.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(prompt_token_ids)
        return choice


async def _chunks(
    envelope: Envelope,
    body: CompletionRequest,
    writers: Sequence[ChoiceWriter],
    deltas: AsyncGenerator[tuple[int, RequestOutput]],
) -> AsyncGenerator[dict[str, Any]]:
    count = TokenCount()
    no_usage: dict[str, Any] = {"usage": None} if body.include_usage else {}
    async with aclosing(deltas):
        async for number, delta in deltas:
            count.add(delta)
            for choice in writers[number].choices(delta):
                if choice["text"] or choice["finish_reason"] or body.logprobs is not None or body.return_token_ids:
                    yield envelope.holding([choice], **no_usage)
    if body.include_usage:
        yield envelope.holding([], usage=count.usage)


async def _bare(llm: AsyncLLM, prompt: Prompt, adapter: str | None) -> Prompt:
    """The prompt's ids without what the tokenizer puts around every text."""
    if not isinstance(prompt, str):
        return prompt
    return list(await llm.tokenize(prompt, adapter=adapter, add_special_tokens=False))


async def _text(llm: AsyncLLM, prompt: Prompt, adapter: str | None) -> str:
    return prompt if isinstance(prompt, str) else await llm.detokenize(prompt, adapter=adapter)
