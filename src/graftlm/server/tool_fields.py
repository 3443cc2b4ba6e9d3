"""Fields about tools, as OpenAI's chat completions spell them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from graftlm.errors import InvalidRequest
from graftlm.server.fields import Items, JsonObject, Strict, Text

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class FunctionDefinition(Strict):
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Strict):
    name: FunctionName


class ToolReference(Strict):
    type: Literal["function"]
    function: FunctionReference


class AllowedSet(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


class ToolFields(Strict):
    tools: Annotated[Items[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolReference | AllowedTools | None = None
    parallel_tool_calls: bool | None = None


class CalledFunction(Strict):
    name: Text
    arguments: Text
    # The client's own reading of the arguments, which the one for Node sends back with them.
    parsed_arguments: Any = None


class AssistantCall(Strict):
    """A call in an assistant's earlier turn."""

    id: Text
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Raises InvalidRequest: as `called_function` does."""
        function = called_function(self.function.name, self.function.arguments, call_id=self.id, param="messages")
        return {"id": self.id, "type": "function", "function": function}


def called_function(name: str, arguments: str, *, call_id: str, param: str) -> dict[str, Any]:
    """A call as templates expect it: the arguments are an object.

    Raises:
        InvalidRequest: they are none; `param` is the field they came in.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"the arguments of the call {call_id} are no JSON object",
            param=param,
            got=repr(arguments)[:100],
            do="send them as they came, or leave the call out",
        )
    return {"name": name, "arguments": value}
