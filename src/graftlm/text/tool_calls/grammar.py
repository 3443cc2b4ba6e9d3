"""Lark grammars of answers that call functions, in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.text.tool_calls.formats import ToolCallFormat

TokenOf = Callable[[str], int | None]

_ANY_TEXT = r"/(.|\n)*/"


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
    return "\n".join(["start: calls", *_rules(form, tools, several, token_of)])


def text_or_calls(form: ToolCallFormat, tools: Sequence[Tool], *, several: bool, token_of: TokenOf) -> str:
    """A grammar of an answer in text that may end in calls; for families without a marker, of text or calls.

    Args: as for `calls_only`.
    """
    if form.marker is None:
        plain = "TEXT: /[^\\s{\\[<](.|\\n)*/"
        return "\n".join(["start: calls | TEXT |", plain, *_rules(form, tools, several, token_of)])
    marker = re.sub(r"([\[\]|/\\])", r"\\\1", form.marker)
    return "\n".join(
        [
            "start: TEXT calls | TEXT",
            f"TEXT: {_ANY_TEXT} & ~/(.|\\n)*{marker}(.|\\n)*/",
            *_rules(form, tools, several, token_of),
        ]
    )


def _rules(form: ToolCallFormat, tools: Sequence[Tool], several: bool, token_of: TokenOf) -> list[str]:
    def written(text: str) -> str:
        return _literal(text, form.special, token_of)

    more = f" ({written(form.between)} call)*" if several else ""
    rules = [f"calls: {written(form.first)} call{more} {written(form.last)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        before, after = form.write_call(tool.name)
        arguments = "gemma_object" if form.ends_arguments is not None else f"%json {_compact(tool.parameters)}"
        rules.append(f"call_{index}: {written(before)} {arguments} {written(after)}")
    if form.ends_arguments is not None:
        rules += _gemma_rules(written(form.special[2]))
    return rules


def _literal(text: str, special: Sequence[str], token_of: TokenOf) -> str:
    """A text in Lark, pieces that are tokens of their own by their ids."""
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    ids = {piece: token_of(piece) for piece in special}
    return " ".join(json.dumps(piece) if ids.get(piece) is None else f"<[{ids[piece]}]>" for piece in pieces if piece)


def _compact(schema: Mapping[str, Any]) -> str:
    """The schema, for JSON with at most a space between its tokens: what the templates show as an example."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": " ?"}}, ensure_ascii=False)


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
