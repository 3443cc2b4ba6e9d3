"""What one chat request may do with tools: what its template is told, which grammar its answer has, and how calls are
read out of it."""

from __future__ import annotations

import json
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftlm.engine.outputs import FinishReason
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.structured_output import WHITESPACE_PATTERN, StructuredOutput
from graftlm.errors import InvalidRequest
from graftlm.server.replies import CalledFunction, CalledFunctionPiece, ChatFinishReason, ToolCall, ToolCallPiece
from graftlm.server.tool_fields import AllowedTools, ToolFields, ToolReference
from graftlm.text import Tokenizer
from graftlm.text.tool_calls import (
    CallArguments,
    CallBegun,
    CallGivenUp,
    Tool,
    ToolCallFormat,
    ToolCallReader,
    ToolEvent,
    calls_only,
    format_of_template,
    json_or_calls,
    text_or_calls,
)

# Of a function without parameters, as OpenAI has it.
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Tools that an answer may call.

    form: how the model writes calls. tools: what it may call. definitions: what its template is told.
    structured: the grammar that holds it to them, if the request wants it held.
    is_named: the request names the function, so that calling it is no surprise to anybody.
    """

    form: ToolCallFormat
    tools: tuple[Tool, ...]
    definitions: tuple[Mapping[str, Any], ...]
    structured: StructuredOutput | None
    is_named: bool

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same parameters, for an answer in which calls can be read: their marks may be special tokens."""
        return replace(params, structured=self.structured, skip_special_tokens=False)

    def answer(self) -> ToolAnswer:
        return ToolAnswer(self)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of an answer: text, and pieces of calls."""

    content: str
    tool_calls: list[ToolCallPiece]


class ToolAnswer:
    """Reads one answer, as it comes or as a whole."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = ToolCallReader(use.form, {tool.name for tool in use.tools})

    def events(self, text: str, *, is_last: bool) -> list[ToolEvent]:
        """What one more piece adds, in its order."""
        return self._reader.push(text) + (self._reader.flush() if is_last else [])

    def new_call_id(self) -> str:
        """An id in the form that the family's templates insist on."""
        if self._use.form.call_id_len is None:
            return f"call_{uuid.uuid4().hex[:24]}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self._use.form.call_id_len))

    def push(self, text: str, *, is_last: bool) -> Piece:
        """What one more piece adds. A stream cannot take back what of a call it has shown when the rest turns out to be
        no call; that rest is text then."""
        content, calls = "", list[ToolCallPiece]()
        for event in self.events(text, is_last=is_last):
            match event:
                case str():
                    content += event
                case CallGivenUp():
                    content += event.rest
                case CallBegun():
                    begun = CalledFunctionPiece(name=event.name, arguments="")
                    call_id = self.new_call_id()
                    calls.append({"index": event.index, "id": call_id, "type": "function", "function": begun})
                case CallArguments():
                    calls.append({"index": event.index, "function": {"arguments": event.text}})
        return Piece(content=content, tool_calls=calls)

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text and calls of a complete answer."""
        content, calls = "", list[ToolCall]()
        for event in self.events(text, is_last=True):
            match event:
                case str():
                    content += event
                case CallGivenUp():
                    content += event.text
                    del calls[len(calls) if event.index is None else event.index :]
                case CallBegun():
                    function = CalledFunction(name=event.name, arguments="")
                    calls.append({"id": self.new_call_id(), "type": "function", "function": function})
                case CallArguments():
                    calls[event.index]["function"]["arguments"] += event.text
        return content, calls

    def finish_reason(self, reason: FinishReason | None) -> ChatFinishReason | None:
        """Why the answer ended, as OpenAI tells it."""
        calls = self._reader.num_calls > 0 and not self._use.is_named
        return "tool_calls" if reason == "stop" and calls else reason


def tool_use(
    body: ToolFields,
    tokenizer: Tokenizer,
    form: ToolCallFormat | None,
    *,
    answer: StructuredOutput | None,
    form_field: str | None,
) -> ToolUse | None:
    """What a request's tools come to; None if nothing may be called.

    Args:
        form: how the model writes calls; None to go by its chat template.
        answer: the form of an answer that calls nothing. form_field: the field that asked for it.

    Raises:
        InvalidRequest: the fields contradict each other, or the model's form cannot keep to what they ask.
    """
    choice = body.tool_choice
    _check_choice(body)
    if not body.tools or choice == "none":
        return None
    form = form or format_of_template(tokenizer.chat_template or "")
    allowed = _allowed_names(choice)
    chosen = [tool.function for tool in body.tools if allowed is None or tool.function.name in allowed]
    tools = tuple(
        Tool(name=function.name, parameters=NO_ARGUMENTS if function.parameters is None else function.parameters)
        for function in chosen
    )
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    is_named = isinstance(choice, ToolReference)
    is_strict = any(function.strict for function in chosen)
    if form.ends_arguments is not None and is_strict:
        raise InvalidRequest(
            "this model's calls are not JSON, and their arguments are not held to a schema",
            param="tools",
            got="strict: true",
            do="leave strict out",
        )
    several = body.parallel_tool_calls is not False and not is_named
    structured = None
    if mode == "required" or is_named:
        structured = _grammar(calls_only(form, tools, several=several, token_of=tokenizer.token_id))
    elif answer is not None:
        structured = _grammar(
            json_or_calls(
                form,
                tools,
                _schema(answer, form_field),
                whitespace_pattern=WHITESPACE_PATTERN,
                several=several,
                token_of=tokenizer.token_id,
            )
        )
    elif is_strict or body.parallel_tool_calls is False:
        structured = _grammar(text_or_calls(form, tools, several=several, token_of=tokenizer.token_id))
    definitions = tuple(tool.model_dump(exclude_none=True) for tool in body.tools)
    return ToolUse(form=form, tools=tools, definitions=definitions, structured=structured, is_named=is_named)


def _schema(answer: StructuredOutput, form_field: str | None) -> Mapping[str, Any] | bool:
    if answer.kind not in ("json", "json_object") or answer.whitespace_pattern is not None:
        raise InvalidRequest(
            f"{form_field} and tools cannot be had together",
            param=form_field,
            allowed="beside tools, a JSON schema or any JSON object",
            do='leave one out, or set tool_choice to "none"',
        )
    try:
        schema: Mapping[str, Any] | bool = json.loads(answer.text)
    except (ValueError, RecursionError) as cause:
        raise InvalidRequest(f"{form_field} is not a JSON schema", param=form_field, got=str(cause)[:100]) from cause
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{form_field} is not a JSON schema", param=form_field, got=type(schema).__name__)
    return schema


def _grammar(lark: str) -> StructuredOutput:
    try:
        return StructuredOutput(grammar=lark)
    except InvalidRequest as error:
        raise InvalidRequest("the tools' schemas are too large", param="tools", got=error.got) from error


def _check_choice(body: ToolFields) -> None:
    names = [tool.function.name for tool in body.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools", got=", ".join(sorted(names))[:200])
    choice = body.tool_choice
    if not names and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice", do="send tools, or leave tool_choice out")
    if unknown := sorted((_allowed_names(choice) or set()) - set(names)):
        raise InvalidRequest(
            "tool_choice names a function that is not among the tools",
            param="tool_choice",
            got=", ".join(unknown)[:200],
            allowed=", ".join(names)[:200],
        )


def _allowed_names(choice: object) -> set[str] | None:
    if isinstance(choice, ToolReference):
        return {choice.function.name}
    if isinstance(choice, AllowedTools):
        return {tool.function.name for tool in choice.allowed_tools.tools}
    return None


def with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of tools with the names of the functions whose calls they answer."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        named.append(message if name is None else {"name": name, **message})
    return named
