"""The JSON that goes back, in OpenAI's shapes. `stop_reason`, `prompt_logprobs`, `token_ids`, `parent` and
`max_model_len` are vLLM's additions, `residency` and the fields after it are Graft's."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, NotRequired, TypedDict

from graftlm.engine.outputs import FinishReason, RequestOutput
from graftlm.engine.residency import ResidencyState


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class RankedToken(TypedDict):
    """vLLM's way to rate a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


ChatFinishReason = FinishReason | Literal["tool_calls"]

# One for each of the prompt's tokens, by token id; nothing predicts the first.
PromptLogprobs = list[dict[str, RankedToken] | None]


class RatedToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(RatedToken):
    top_logprobs: list[RatedToken]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionPiece(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """The first piece of a call has its id, its type and its name, the others arguments only."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionPiece


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPiece]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["graft"]
    root: str
    parent: str | None
    max_model_len: int


class AdapterCard(ModelCard):
    residency: ResidencyState
    method: str | None
    ranks: list[int] | None
    num_bytes: int | None
    digest: str | None


class Envelope:
    """What every object of one answer has in common: its id, its time and the model's name as the client gave it."""

    def __init__(self, *, prefix: str, kind: str, model: str) -> None:
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def holding(self, choices: list[Any], **more: object) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}


class TokenCount:
    """Usage over the requests of one HTTP call, whose counts grow with each delta."""

    def __init__(self) -> None:
        self._prompt: dict[str, int] = {}
        self._completion: dict[str, int] = {}
        self._cached: dict[str, int] = {}

    def add(self, output: RequestOutput) -> None:
        self._prompt[output.request_id] = len(output.prompt_token_ids)
        self._completion[output.request_id] = output.num_output_tokens
        self._cached[output.request_id] = output.num_cached_tokens

    @property
    def usage(self) -> Usage:
        prompt, completion = sum(self._prompt.values()), sum(self._completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
