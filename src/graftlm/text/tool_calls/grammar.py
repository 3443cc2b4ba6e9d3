"""Lark grammars of answers that call functions, in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.text.tool_calls.formats import ToolCallFormat

TokenOf = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that may be called. parameters: JSON schema of its arguments' object."""

    name: str
    parameters: Mapping[str, Any]


def calls_only(form: ToolCallFormat, tools: Sequence[Tool], *, several: bool, token_of: TokenOf) -> str:
    """A grammar of one call, or one or more, and nothing else.

    Args:
        token_of: the id of a text that is a token of its own, if it is one.
    """
    return _Writer(form, tools, several, token_of).grammar("start: calls")


def text_or_calls(form: ToolCallFormat, tools: Sequence[Tool], *, several: bool, token_of: TokenOf) -> str:
    """A grammar of an answer in text that may end in calls; for families without a marker, of text or calls.

    Args: as for `calls_only`.
    """
    writer = _Writer(form, tools, several, token_of)
    if form.marker is None:
        return writer.grammar("start: calls | TEXT |", "TEXT: /[^\\s{\\[<](.|\\n)*/")
    marker = re.sub(r"([\[\]|/\\])", r"\\\1", form.marker)
    text = f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{marker}(.|\\n)*/"
    if token_of(form.marker) is not None:
        return writer.grammar("start: TEXT calls | TEXT", text)
    # Text ends where the marker does: the lexer does not go back to where it begins.
    return writer.grammar("start: head begun_calls | TEXT", text, f"head[lazy]: /(.|\\n)*{marker}/")


def json_or_calls(
    form: ToolCallFormat,
    tools: Sequence[Tool],
    schema: Mapping[str, Any] | bool,
    *,
    whitespace_pattern: str,
    several: bool,
    token_of: TokenOf,
) -> str:
    """A grammar of an answer that is JSON of a schema, or calls; for families without a marker, one call.

    Args:
        schema: of an answer that calls nothing. whitespace_pattern: what may stand between its tokens.
        others: as for `calls_only`.
    """
    answer = f"answer: %json {_with_whitespace(schema, whitespace_pattern)}"
    if form.marker is not None:
        return _Writer(form, tools, several, token_of).grammar("start: answer | calls", answer)
    # Here a call begins as other JSON does, and must be told from it key by key.
    calls = [f"call_{index}: %json {_call_schema(form, tool)}" for index, tool in enumerate(tools)]
    return "\n".join(["start: answer | " + " | ".join(f"call_{index}" for index in range(len(tools))), answer, *calls])


class _Writer:
    """Rules for one family's calls of some tools. `calls` are one or more; `begun_calls` the same behind the marker."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[Tool], several: bool, token_of: TokenOf) -> None:
        self._form = form
        self._tools = tools
        self._several = several
        self._token_of = token_of

    def grammar(self, *rules: str) -> str:
        form = self._form
        more = f" ({self._text(form.between)} call)*" if self._several else ""
        end = f"{more} {self._text(form.last)}"
        calls = [f"calls: {self._text(form.first)} call{end}", *self._calls("call", "")]
        if any("begun_calls" in rule for rule in rules):
            marker = form.marker or ""
            if form.first:
                calls.append(f"begun_calls: {self._text(form.first.removeprefix(marker))} call{end}")
            else:
                calls += [f"begun_calls: begun{end}", *self._calls("begun", marker)]
        if form.ends_arguments is not None:
            calls += _gemma_rules(self._text(form.special[2]))
        return "\n".join([*rules, *calls])

    def _calls(self, rule: str, begun_with: str) -> list[str]:
        """A rule for one call of any of the tools, less what it has begun with."""
        rules = [f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            before, after = self._form.write_call(tool.name)
            arguments = f"%json {_compact(tool.parameters)}" if self._form.ends_arguments is None else "gemma_object"
            parts = (self._text(before.removeprefix(begun_with)), arguments, self._text(after))
            rules.append(f"{rule}_{index}: " + " ".join(parts))
        return rules

    def _text(self, text: str) -> str:
        return _literal(text, self._form.special, self._token_of)


def _literal(text: str, special: Sequence[str], token_of: TokenOf) -> str:
    """A text in Lark, pieces that are tokens of their own by their ids."""
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    ids = {piece: token_of(piece) for piece in special}
    return " ".join(json.dumps(piece) if ids.get(piece) is None else f"<[{ids[piece]}]>" for piece in pieces if piece)


def _compact(schema: Mapping[str, Any]) -> str:
    """The schema, for JSON with at most a space between its tokens: what the templates show as an example."""
    return _with_whitespace(schema, " ?")


def _with_whitespace(schema: Mapping[str, Any] | bool, pattern: str) -> str:
    rules = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return json.dumps({**rules, "x-guidance": {"whitespace_pattern": pattern}}, ensure_ascii=False)


def _call_schema(form: ToolCallFormat, tool: Tool) -> str:
    """Schema of a whole call that is a JSON object."""
    before, after = form.write_call(tool.name)
    call = json.loads(f"{before}{{}}{after}")
    properties = {key: {"const": value} if isinstance(value, str) else tool.parameters for key, value in call.items()}
    # References are from the root.
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    rules = {"type": "object", "properties": properties, "required": list(call), "additionalProperties": False}
    return _compact({**rules, **definitions})


def _gemma_rules(quote: str) -> list[str]:
    """Any object in Gemma's notation, whose strings stand between tokens of their own."""
    return [
        'gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"',
        'gemma_pair: GEMMA_KEY ":" gemma_value',
        f"gemma_value: {quote} GEMMA_TEXT {quote} | GEMMA_PLAIN | gemma_object | gemma_list",
        'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
        "GEMMA_KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        "GEMMA_TEXT: /[^<]*/",
        r"GEMMA_PLAIN: /true|false|null|-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/",
    ]
