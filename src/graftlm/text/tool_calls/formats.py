"""How model families write calls of functions, as data. Names are those of vLLM's `--tool-call-parser`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import regex

from graftlm.errors import ConfigurationError, InvalidRequest

_JSON_HEADER = r'\s*\{\s*"name"\s*:\s*"(?P<name>[\w.\-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_JSON_TAIL = r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}'


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """One family's way to write calls. Patterns are matched from where the text before them ends.

    marker: text before the first call; None if an answer is calls from its beginning or none. opening: what an answer
        of calls begins with, where there is no marker.
    header: of a call, up to its arguments; has a group `name`. tail: what follows the arguments.
    following: between a call and the next. closing: after the last.
    write_call: a call without its arguments, given the name: what is before them and after.
    first, between, last: what is written before, between and after calls.
    special: pieces of these texts that may be tokens of their own.
    ends_arguments: text that ends the arguments, which are not JSON then.
    to_json: arguments as JSON; raises ValueError.
    call_id_len: characters of a call's id that the family's templates insist on.
    """

    name: str
    marker: str | None
    opening: regex.Pattern[str] = field(default_factory=lambda: regex.compile(""))
    header: regex.Pattern[str]
    tail: regex.Pattern[str]
    following: regex.Pattern[str] | None = None
    closing: regex.Pattern[str] | None = None
    write_call: Callable[[str], tuple[str, str]]
    first: str = ""
    between: str = ""
    last: str = ""
    special: tuple[str, ...] = ()
    ends_arguments: str | None = None
    to_json: Callable[[str], str] = str
    call_id_len: int | None = None


def _object_with(key: str, before: str = "", after: str = "") -> Callable[[str], tuple[str, str]]:
    return lambda name: (f'{before}{{"name": {json.dumps(name)}, "{key}": ', f"}}{after}")


def _gemma(name: str, *, begin: str, end: str, quote: str) -> ToolCallFormat:
    return ToolCallFormat(
        name=name,
        marker=begin,
        header=regex.compile(r"\s*call:(?P<name>[\w.\-]+)(?=\{)"),
        tail=regex.compile(regex.escape(end)),
        write_call=lambda function: (f"{begin}call:{function}", end),
        special=(begin, end, quote),
        ends_arguments=end,
        to_json=lambda text: _from_gemma(text, quote),
    )


def _from_gemma(text: str, quote: str) -> str:
    """`{city:<|"|>Rome<|"|>,days:2}` as JSON."""
    delimiter = re.escape(quote)
    piece = re.compile(rf"{delimiter}(?P<text>.*?){delimiter}|(?P<key>[A-Za-z_][\w.\-]*)\s*(?=:)", re.DOTALL)

    def quoted(match: re.Match[str]) -> str:
        return json.dumps(match["key"] if match["text"] is None else match["text"], ensure_ascii=False)

    return json.dumps(json.loads(piece.sub(quoted, text)), ensure_ascii=False)


FORMATS = {
    form.name: form
    for form in (
        ToolCallFormat(
            name="hermes",
            marker="<tool_call>",
            header=regex.compile(_JSON_HEADER),
            tail=regex.compile(_JSON_TAIL),
            closing=regex.compile(r"\s*</tool_call>"),
            write_call=_object_with("arguments", "<tool_call>\n", "\n</tool_call>"),
            between="\n",
            special=("<tool_call>", "</tool_call>"),
        ),
        ToolCallFormat(
            name="llama3_json",
            marker=None,
            opening=regex.compile(r"\s*(?:<\|python_tag\|>\s*)?(?=\{)"),
            header=regex.compile(_JSON_HEADER),
            tail=regex.compile(_JSON_TAIL),
            following=regex.compile(r"\s*;\s*(?=\{)"),
            write_call=_object_with("parameters"),
            between="; ",
        ),
        ToolCallFormat(
            name="mistral",
            marker="[TOOL_CALLS]",
            header=regex.compile(r"\s*\[?" + _JSON_HEADER),
            tail=regex.compile(_JSON_TAIL),
            following=regex.compile(r"\s*,\s*(?=\{)"),
            closing=regex.compile(r"\s*\]"),
            write_call=_object_with("arguments"),
            first="[TOOL_CALLS][",
            between=", ",
            last="]",
            special=("[TOOL_CALLS]",),
            call_id_len=9,
        ),
        ToolCallFormat(
            name="mistral_args",
            marker="[TOOL_CALLS]",
            header=regex.compile(r"\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)"),
            tail=regex.compile(""),
            write_call=lambda name: (f"[TOOL_CALLS]{name}[ARGS]", ""),
            special=("[TOOL_CALLS]", "[ARGS]"),
            call_id_len=9,
        ),
        _gemma("gemma", begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
        _gemma("functiongemma", begin="<start_function_call>", end="<end_function_call>", quote="<escape>"),
        ToolCallFormat(
            name="json",
            marker=None,
            opening=regex.compile(r"\s*(?:\[\s*)?(?=\{)"),
            header=regex.compile(_JSON_HEADER),
            tail=regex.compile(_JSON_TAIL),
            following=regex.compile(r"\s*[,;]?\s*(?=\{)"),
            closing=regex.compile(r"\s*\]"),
            write_call=_object_with("arguments"),
            between="\n",
        ),
    )
}


def named_format(name: str) -> ToolCallFormat:
    """Raises ConfigurationError: there is none of this name."""
    if name not in FORMATS:
        raise ConfigurationError("there is no such tool_call_parser", got=name, allowed=", ".join(FORMATS))
    return FORMATS[name]


def format_of_template(chat_template: str) -> ToolCallFormat:
    """How a model calls functions, by what its chat template says of calls; JSON where it says nothing of them.

    Raises:
        InvalidRequest: in a form that is none of `FORMATS`.
    """
    if "<function=" in chat_template:
        raise InvalidRequest(
            "this model calls functions in a form that is not supported",
            param="tools",
            got="<function=…>",
            allowed=", ".join(FORMATS),
            do="serve it with --tool-call-parser if it knows another form too",
        )
    if "[TOOL_CALLS]" in chat_template:
        return FORMATS["mistral_args" if "[ARGS]" in chat_template else "mistral"]
    marks = {
        "<tool_call>": "hermes",
        "<|tool_call>": "gemma",
        "<start_function_call>": "functiongemma",
        "<|python_tag|>": "llama3_json",
        '"parameters": ': "llama3_json",
    }
    return FORMATS[next((name for mark, name in marks.items() if mark in chat_template), "json")]
