"""Calls in the text of every family, however it is cut into pieces (R083)."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from graftlm.errors import ConfigurationError, InvalidRequest
from graftlm.text.tool_calls import (
    FORMATS,
    CallArguments,
    CallBegun,
    CallGivenUp,
    ToolCallReader,
    format_of_template,
    named_format,
)

NAMES = {"f", "get_weather"}
ROME = {"city": 'Rome, "x" {', "days": 2, "tags": [True, {"a": None}]}
JSON = json.dumps(ROME)
GEMMA = 'call:get_weather{city:<|"|>Rome, "x" {<|"|>,days:2,tags:[true,{a:null}]}'
FIRST = ("get_weather", ROME)
WRITTEN: dict[str, tuple[str, str, str]] = {
    # What the family's model writes: text before, a call of get_weather and then one of f without arguments.
    "hermes": (
        "Sure.",
        f'\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ("", f'{{"name": "get_weather", "parameters": {JSON}}}', '; {"name": "f", "parameters": {}}'),
    "mistral": (
        "Sure.",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}, "id": "abcdefghi"}}',
        ', {"name": "f", "arguments": {}}]',
    ),
    "mistral_args": ("Sure.", f"[TOOL_CALLS]get_weather[ARGS]{JSON}", "[TOOL_CALLS]f{}"),
    "gemma": ("Sure.", f"<|tool_call>{GEMMA}<tool_call|>", "<|tool_call>call:f{}<tool_call|>"),
    "functiongemma": (
        "",
        "<start_function_call>" + GEMMA.replace('<|"|>', "<escape>") + "<end_function_call>",
        "<start_function_call>call:f{}<end_function_call>",
    ),
    "json": ("", f'[{{"name": "get_weather", "arguments": {JSON}}}', ', {"name": "f", "arguments": {}}]'),
}
OTHER_SPELLINGS = [
    ("hermes", f'<tool_call>{{"arguments": {JSON}, "name": "get_weather"}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(JSON)}}}</tool_call>'),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {JSON}}}'),
    ("llama3_json", f'{{"name":"get_weather","parameters":{JSON}}}'),
    ("json", f'{{"type": "function", "function": {{"name": "get_weather", "parameters": {JSON}}}}}'),
    ("mistral_args", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{JSON}"),
]
NO_CALLS = [
    ("hermes", "plain <tool_ca"),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>get_weather(city='Rome')</tool_call>"),
    ("hermes", '<tool_call>{"name": "get_weather", "argu'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro'),
    ("llama3_json", 'Look: {"name": "get_weather", "parameters": {}}'),
    ("llama3_json", '{"answer": 42} is it'),
    ("mistral", "[TOOL_CALLS]nothing"),
    ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("gemma", "<|tool_call>call:get_weather{city:Rome}<tool_call|>!"),
    ("json", "[1, 2]"),
    ("json", " {\n"),
]


@dataclass
class Read:
    content: str
    shown: str
    calls: list[tuple[str, str]]


def read(form: str, text: str, size: int) -> Read:
    """What a client has in the end (content, calls), and the text that a stream has shown it."""
    reader = ToolCallReader(FORMATS[form], NAMES)
    events = [event for start in range(0, len(text), size) for event in reader.push(text[start : start + size])]
    result = Read("", "", [])
    for event in [*events, *reader.flush()]:
        match event:
            case str():
                result.content += event
                result.shown += event
            case CallBegun(index=index, name=name):
                assert index == len(result.calls)
                result.calls.append((name, ""))
            case CallArguments(index=index, text=piece):
                name, arguments = result.calls[index]
                result.calls[index] = (name, arguments + piece)
                result.shown += piece
            case CallGivenUp(index=given_up, text=all_of_it, rest=rest):
                result.calls = result.calls[:given_up] if given_up is not None else result.calls
                result.content += all_of_it
                result.shown += rest
    assert reader.num_calls == len(result.calls)
    return result


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("form", FORMATS)
def test_r083_two_calls_and_the_text_before_them_are_read_in_pieces_of_any_size(form: str, size: int) -> None:
    before, first, second = WRITTEN[form]
    result = read(form, before + first + second, size)
    assert result.content == before
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [FIRST, ("f", {})]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize(("form", "text"), OTHER_SPELLINGS)
def test_other_spellings_of_a_call_are_read_too(form: str, text: str, size: int) -> None:
    result = read(form, text, size)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [FIRST]
    assert result.content == ""


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_text_and_nothing_of_it_is_lost(form: str, text: str, size: int) -> None:
    result = read(form, text, size)
    assert result.content == text
    assert result.calls == []
    assert text.endswith(result.shown[-8:])


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader(FORMATS["hermes"], NAMES)
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push('{"a": ') == [CallBegun(index=0, name="f"), CallArguments(index=0, text='{"a": ')]
    assert reader.push('"b') == [CallArguments(index=0, text='"b')]
    assert reader.push('"}') == [CallArguments(index=0, text='"}')]


TEMPLATES = {
    "hermes": "{% for tool in tools %}{% endfor %}<tool_call>\n{{ call | tojson }}\n</tool_call>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [",
    "mistral_args": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "llama3_json": '{{ tools }}{"name": "{{ name }}", "parameters": {{ arguments }}}<|python_tag|>',
    "gemma": "{{ tools }}<|tool_call>call:{{ name }}<tool_call|>",
    "functiongemma": "{{ tools }}<start_function_call>call:{{ name }}",
    "json": "{{ messages }}",
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_chat_template_tells_how_calls_are_written(form: str) -> None:
    assert format_of_template(TEMPLATES[form]).name == form


def test_a_form_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="tool-call-parser"):
        format_of_template("{{ tools }}<tool_call>\n<function=name>")
    with pytest.raises(ConfigurationError, match="hermes"):
        named_format("nothing")
