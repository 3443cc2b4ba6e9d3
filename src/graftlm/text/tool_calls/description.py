"""Tools for models whose chat template has no place for them: told in plain messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def tell_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the tools, if there are any, in its system message, calls as the JSON they were written in,
    and results as messages of the user."""
    turns = [_plain(message) for message in messages]
    if not tools:
        return turns
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = (
        f"You can call these functions:\n{functions}\n"
        'To call one, answer with nothing but {"name": "its name", "arguments": {...}}, one line for each call.'
    )
    if turns and turns[0].get("role") in ("system", "developer"):
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{told}"}, *turns[1:]]
    return [{"role": "system", "content": told}, *turns]


def _plain(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result of {message.get('name', 'the call')}: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}
