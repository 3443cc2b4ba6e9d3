"""What the routes accept. Types are strict: a bool is no number, a string is no number, NaN is nothing, and a field
that is not listed here is refused by name. OpenAI fields that Graft does not offer are listed with the values that ask
for nothing; any other value is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from graftlm.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from graftlm.errors import InvalidRequest
from graftlm.server.fields import Items, JsonObject, Strict, Text, nothing_but
from graftlm.server.prompts import MAX_ANSWERS, Prompt, parse_prompts
from graftlm.server.response_fields import InputItem, ResponseToolFields, turns_of
from graftlm.server.structured_fields import StructuredFields, TextFormat, structured_output
from graftlm.server.tool_fields import AssistantCall, ToolFields

_LARGEST_INTEGER = 2**31 - 1
_MOST_IDS = 1 << 15
_LONGEST_NAME = 256
_LONGEST_PATH = 4096


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_user_message(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, nothing_but(None, False)] = None


class StreamOptionsOfResponse(Strict):
    include_obfuscation: Annotated[Any, nothing_but(None, False)] = None


class _Generation(StructuredFields):
    """What both generation routes share. null is the same as absent; the defaults are those of `SamplingParams`."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[Items[Text] | None, BeforeValidator(_as_list)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None

    # Not OpenAI's; named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=_MOST_IDS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    allowed_token_ids: Annotated[Any, nothing_but(None)] = None
    cache_salt: Annotated[Any, nothing_but(None)] = None
    length_penalty: Annotated[Any, nothing_but(None, 1, 1.0)] = None
    return_tokens_as_token_ids: Annotated[Any, nothing_but(None, False)] = None
    spaces_between_special_tokens: Annotated[Any, nothing_but(None, True)] = None
    truncate_prompt_tokens: Annotated[Any, nothing_but(None)] = None
    use_beam_search: Annotated[Any, nothing_but(None, False)] = None

    # Graft's own: seconds after which the request is given up.
    timeout: Annotated[float, Field(gt=0)] | None = None

    # Labels for the caller's own books.
    user: Text | None = None
    metadata: JsonObject | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        """Raises InvalidRequest: stream_options without stream, or what no stream carries with one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options needs a stream",
                param="stream_options",
                do="set stream to true or leave stream_options out",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs come with a whole answer only",
                param="prompt_logprobs",
                do="leave out stream, or prompt_logprobs",
            )

    def timeout_within(self, limit: float | None) -> float | None:
        """Seconds the request has: what it asks for, and no more than the server allows."""
        return _shorter(self.timeout, limit)

    def shared_sampling(self) -> dict[str, Any]:
        """The given sampling fields, as keyword arguments of `SamplingParams`."""
        names = (
            "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "min_p",
            "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output",
            "skip_special_tokens", "priority",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.top_k is not None:
            # vLLM's clients send -1 for "all", Graft and newer vLLM say 0.
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if (structured := self.structured()) is not None:
            given["structured"] = structured
        return given


def _shorter(*seconds: float | None) -> float | None:
    return min((value for value in seconds if value is not None), default=None)


def _token_id(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise InvalidRequest(
            "logit_bias has a key that is not a token id", param="logit_bias", got=repr(key), allowed="whole numbers"
        )
    return int(key)


class CompletionRequest(_Generation):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None

    best_of: Annotated[Any, nothing_but(None, 1)] = None
    suffix: Annotated[Any, nothing_but(None, "")] = None

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest: a value is out of range."""
        self.check_stream_options()
        given = self.shared_sampling()
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        echoed = self.logprobs if self.echo else None
        prompt_logprobs = max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)
        num_answers = len(self.prompt) * (self.n or 1)
        if num_answers > MAX_ANSWERS:
            raise InvalidRequest(
                "too many answers asked for",
                param="n",
                got=num_answers,
                allowed=f"at most {MAX_ANSWERS}, all prompts together",
            )
        return SamplingParams(**given, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn. The fields that an assistant's own reply comes with are accepted when they are empty, so that it can be
    sent back as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[Items[TextPart], Field(min_length=1)] | None, BeforeValidator(_as_parts)] = None
    name: Text | None = None
    tool_calls: Items[AssistantCall] | None = None
    tool_call_id: Text | None = None

    # The client's own reading of the content, which the one for Node sends back with it.
    parsed: Any = None
    refusal: Annotated[Any, nothing_but(None)] = None
    annotations: Annotated[Any, nothing_but(None, [])] = None
    audio: Annotated[Any, nothing_but(None)] = None
    function_call: Annotated[Any, nothing_but(None)] = None

    @model_validator(mode="after")
    def _check_tools(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("no_content", "content, which only a turn of tool_calls may leave out")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls in turns of the assistant only")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("tool_call_id", "tool_call_id in turns of the role tool, and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """What the chat template sees. Text parts are joined with nothing between them.

        Raises:
            InvalidRequest: a call's arguments are no JSON object.
        """
        turn: dict[str, Any] = {"role": self.role, "content": "".join(part.text for part in self.content or ())}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class _Rendering(Strict):
    """How messages become a prompt. The fields are vLLM's."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    chat_template: Annotated[Any, nothing_but(None)] = None

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.render_chat`.

        Raises:
            InvalidRequest: the answer cannot both go on with the last message and begin one of its own.
        """
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt",
                param="continue_final_message",
                do="set one of them",
            )
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "template_variables": self.chat_template_kwargs or {},
        }


class ChatRequest(_Generation, _Rendering, ToolFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_LARGEST_INTEGER)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_LARGEST_INTEGER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    audio: Annotated[Any, nothing_but(None)] = None
    function_call: Annotated[Any, nothing_but(None, "none", "auto")] = None
    functions: Annotated[Any, nothing_but(None, [])] = None
    modalities: Annotated[Any, nothing_but(None, ["text"])] = None
    moderation: Annotated[Any, nothing_but(None)] = None
    prediction: Annotated[Any, nothing_but(None)] = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: Annotated[Any, nothing_but(None)] = None
    prompt_cache_retention: Annotated[Any, nothing_but(None, "in_memory")] = None
    reasoning_effort: Annotated[Any, nothing_but(None, "none")] = None
    safety_identifier: Text | None = None
    service_tier: Annotated[Any, nothing_but(None, "auto", "default")] = None
    store: Annotated[Any, nothing_but(None, False)] = None
    verbosity: Annotated[Any, nothing_but(None, "medium")] = None
    web_search_options: Annotated[Any, nothing_but(None)] = None

    def sampling_params(self) -> SamplingParams:
        """Without a limit the answer may take what is left of the context.

        Raises InvalidRequest: a value is out of range, or two fields contradict each other.
        """
        self.check_stream_options()
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ",
                param="max_completion_tokens",
                got=f"{self.max_tokens} and {self.max_completion_tokens}",
                do="send one of them",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs", do="set logprobs to true")
        return SamplingParams(
            **self.shared_sampling(),
            max_tokens=limits.pop() if limits else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class ResponseText(Strict):
    """What a response's text is to look like."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, nothing_but(None, "medium")] = None


class ResponseRequest(ResponseToolFields):
    """Body of POST /v1/responses."""

    model: Text
    input: Annotated[Items[InputItem], BeforeValidator(_as_user_message), Field(min_length=1)]
    instructions: Text | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=_LARGEST_INTEGER)] | None = None
    metadata: dict[Text, Text] | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptionsOfResponse | None = None
    temperature: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    top_p: float | None = None
    user: Text | None = None

    # Not OpenAI's: as in the other generation routes.
    seed: int | None = None
    stop: Annotated[Items[Text] | None, BeforeValidator(_as_list)] = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    background: Annotated[Any, nothing_but(None, False)] = None
    context_management: Annotated[Any, nothing_but(None)] = None
    conversation: Annotated[Any, nothing_but(None)] = None
    max_tool_calls: Annotated[Any, nothing_but(None)] = None
    moderation: Annotated[Any, nothing_but(None)] = None
    previous_response_id: Annotated[Any, nothing_but(None)] = None
    prompt: Annotated[Any, nothing_but(None)] = None
    prompt_cache_options: Annotated[Any, nothing_but(None)] = None
    prompt_cache_retention: Annotated[Any, nothing_but(None, "in_memory")] = None
    reasoning: Annotated[Any, nothing_but(None)] = None
    service_tier: Annotated[Any, nothing_but(None, "auto", "default")] = None
    store: Annotated[Any, nothing_but(None, False)] = None
    text: ResponseText | None = None
    truncation: Annotated[Any, nothing_but(None, "disabled")] = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template, instructions first.

        Raises:
            InvalidRequest: as `turns_of` does.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, *turns_of(self.input)]

    def timeout_within(self, limit: float | None) -> float | None:
        """Seconds the request has: what it asks for, and no more than the server allows."""
        return _shorter(self.timeout, limit)

    def sampling_params(self) -> SamplingParams:
        """Without a limit the answer may take what is left of the context.

        Raises:
            InvalidRequest: a value is out of range, or two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs a stream", param="stream_options", do="set stream to true")
        if self.top_logprobs is not None and not self.include:
            raise InvalidRequest(
                "top_logprobs needs log-probabilities",
                param="top_logprobs",
                do='set include to ["message.output_text.logprobs"]',
            )
        names = ("temperature", "top_p", "seed", "stop")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if (form := self._form()) is not None:
            given["structured"] = structured_output(form, "text")
        logprobs = (self.top_logprobs or 0) if self.include else None
        return SamplingParams(**given, max_tokens=self.max_output_tokens, logprobs=logprobs)

    @property
    def form_field(self) -> str | None:
        """The field that asks for a form, if one does."""
        return None if self._form() is None else "text"

    def check_beside_tools(self) -> None:
        """Raises InvalidRequest: a field that only an answer in text has. A call's tokens are in no part of a text."""
        if self.include:
            raise InvalidRequest(
                "log-probabilities come with text only",
                param="include",
                do='leave include out, or set tool_choice to "none"',
            )

    def _form(self) -> dict[str, Any] | None:
        return None if self.text is None or self.text.format is None else self.text.format.form()


# Routes that generate, each with its body.
REQUEST_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
}


class TokenizeRequest(_Rendering):
    """Body of POST /tokenize: a text, or a conversation. Without a model it is the base's tokenizer that is asked."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest: it is about no text or about two, or a field is not of the one it is about."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("one thing can be tokenised", param="prompt", allowed="either prompt or messages")
        of_messages = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        names = of_messages if self.messages is None else ("add_special_tokens",)
        for name in names:
            if getattr(self, name) is not None:
                other = "messages" if self.messages is None else "prompt"
                raise InvalidRequest(f"{name} belongs to {other}", param=name, do="leave it out")


class DetokenizeRequest(Strict):
    """Body of POST /detokenize. Without a model it is the base's tokenizer that is asked."""

    model: Text | None = None
    tokens: Items[Annotated[int, Field(ge=0, le=_LARGEST_INTEGER)]]


class LoadAdapterRequest(Strict):
    """Body of POST /v1/load_lora_adapter. A relative `lora_path` is looked for below each allowed folder."""

    lora_name: Annotated[Text, Field(min_length=1, max_length=_LONGEST_NAME)]
    lora_path: Annotated[Text, Field(min_length=1, max_length=_LONGEST_PATH)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(Strict):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[Text, Field(min_length=1, max_length=_LONGEST_NAME)]
    lora_int_id: Annotated[Any, nothing_but(None)] = None

    # Not vLLM's: end running requests instead of letting them finish.
    force: bool | None = None


class DrainWorkerRequest(Strict):
    """Body of POST /v1/drain_worker. worker: its id, a replica's or a node's, as /status shows them."""

    worker: Annotated[Text, Field(min_length=1, max_length=_LONGEST_NAME)]
