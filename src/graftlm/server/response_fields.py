"""Fields of a response's request that chat completions spell otherwise: the items of its input, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from graftlm.errors import InvalidRequest
from graftlm.server.fields import Items, JsonObject, Strict, Text, nothing_but
from graftlm.server.tool_fields import (
    MAX_TOOLS,
    AllowedSet,
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    FunctionReference,
    ToolDefinition,
    ToolFields,
    ToolReference,
    called_function,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class ResponsePart(Strict):
    """A piece of a message's text: sent, or out of an earlier response."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Annotated[Any, nothing_but(None, [])] = None
    # What the earlier response told of its tokens.
    logprobs: Items[Any] | None = None
    # The client's own reading of the text, which the one for Node sends back with it.
    parsed: Any = None


Parts = Annotated[Items[ResponsePart], BeforeValidator(_as_parts), Field(min_length=1)]


class ResponseMessage(Strict):
    """A message, which may be one that came out of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: Text | None = None
    status: ItemStatus | None = None
    phase: Annotated[Any, nothing_but(None)] = None


class ResponseCall(Strict):
    """A call of a function out of an earlier response."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    # As `parsed` above.
    parsed_arguments: Any = None
    id: Text | None = None
    status: ItemStatus | None = None
    namespace: Annotated[Any, nothing_but(None)] = None
    caller: Annotated[Any, nothing_but(None)] = None


class ResponseCallOutput(Strict):
    """What a function that was called has returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts
    id: Text | None = None
    status: ItemStatus | None = None
    name: Annotated[Any, nothing_but(None)] = None
    namespace: Annotated[Any, nothing_but(None)] = None
    caller: Annotated[Any, nothing_but(None)] = None


def _type_of(item: object) -> object:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[ResponseCall, Tag("function_call")]
    | Annotated[ResponseCallOutput, Tag("function_call_output")],
    Discriminator(
        _type_of,
        custom_error_type="item_type",
        custom_error_message="items of the types message, function_call and function_call_output",
    ),
]


def turns_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items as turns of a chat. Calls belong to the turn of the assistant before them, if there is one.

    Raises:
        InvalidRequest: the output of a call that is not among the items before it, or arguments that are no JSON
            object.
    """
    turns: Items[dict[str, Any]] = []
    call_ids: set[str] = set()
    for item in items:
        match item:
            case ResponseMessage():
                turns.append({"role": item.role, "content": _text(item.content)})
            case ResponseCall():
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                function = called_function(item.name, item.arguments, call_id=item.call_id, param="input")
                call = {"id": item.call_id, "type": "function", "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
                call_ids.add(item.call_id)
            case ResponseCallOutput():
                if item.call_id not in call_ids:
                    raise InvalidRequest(
                        "a function_call_output has no function_call before it",
                        param="input",
                        got=f"call_id {item.call_id!r}"[:100],
                        do="send the call's item as well",
                    )
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return turns


def _text(parts: Sequence[ResponsePart]) -> str:
    return "".join(part.text for part in parts)


class ResponseTool(Strict):
    """A function, without the wrapping that it has in chat completions."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, nothing_but(None, ["direct"])] = None
    defer_loading: Annotated[Any, nothing_but(None, False)] = None
    output_schema: Annotated[Any, nothing_but(None)] = None

    def as_in_chat(self) -> ToolDefinition:
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return ToolDefinition(type="function", function=function)


class ResponseToolReference(Strict):
    type: Literal["function"]
    name: FunctionName

    def as_in_chat(self) -> ToolReference:
        return ToolReference(type="function", function=FunctionReference(name=self.name))


class ResponseAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ResponseToolReference], Field(min_length=1, max_length=MAX_TOOLS)]

    def as_in_chat(self) -> AllowedTools:
        allowed = AllowedSet(mode=self.mode, tools=[tool.as_in_chat() for tool in self.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)


class ResponseToolFields(Strict):
    tools: Annotated[Items[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolReference | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None

    def tools_as_in_chat(self) -> ToolFields:
        choice = self.tool_choice
        return ToolFields(
            tools=None if self.tools is None else [tool.as_in_chat() for tool in self.tools],
            tool_choice=choice if choice is None or isinstance(choice, str) else choice.as_in_chat(),
            parallel_tool_calls=self.parallel_tool_calls,
        )
