"""Functions that a model calls, as the openai client sees them (R083)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from graftlm import AsyncLLM
from tests.server.live_server import LiveServer, serving
from tests.server.scripted import make_scripted
from tests.tiny import make_adapter

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
ROME = {"city": "Rome", "days": 2}
SCRIPTS = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}; '
    '{"name": "stop", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "stop", "arguments": {}}]',
    "mistral_args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]stop[ARGS]{}',
    "gemma": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|><|tool_call>call:stop{}<tool_call|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>"
    "<start_function_call>call:stop{}<end_function_call>",
    "json": '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n{"name": "stop", "arguments": {}}',
}
OTHERS = {
    "text": "It rains.",
    "malformed": '<tool_call>\n{"name": "get_weather", "arguments": {"city": Rome}}\n</tool_call>',
    "unknown": '<tool_call>\n{"name": "format_disk", "arguments": {}}\n</tool_call>',
}
# Each has the marks by which a family's template is known, and renders as the last message alone.
TEMPLATES = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS] [ARGS]",
    "gemma": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "json": "",
}


@dataclass(frozen=True, kw_only=True)
class Scripted:
    server: LiveServer
    prompts: dict[str, str]

    def ask(self, form: str, script: str, **fields: Any) -> Any:
        fields = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, **fields}
        messages: list[Any] = [{"role": "user", "content": self.prompts[script]}]
        return self.server.openai.chat.completions.create(model=form, messages=messages, **fields)

    def stream(self, form: str, script: str, **fields: Any) -> Any:
        """The message that the client's own accumulator makes of a stream."""
        fields = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, **fields}
        messages: list[Any] = [{"role": "user", "content": self.prompts[script]}]
        with self.server.openai.chat.completions.stream(model=form, messages=messages, **fields) as stream:
            return stream.get_final_completion()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("tools")
    prompts = make_scripted(folder / "base", {**SCRIPTS, **OTHERS})
    adapters: dict[str, Path] = {}
    for form, marks in TEMPLATES.items():
        adapters[form] = make_adapter(folder / "base", folder / form, target_modules=["c_attn"], fan_in_fan_out=True)
        template = f"{{{{ messages[-1]['content'] }}}}{{# {marks} #}}{{% if tools %}}{{% endif %}}"
        (adapters[form] / "chat_template.jinja").write_text(template)
    with serving(AsyncLLM(folder / "base", name="base", adapters=adapters, kv_cache_bytes=64 << 20)) as live:
        yield Scripted(server=live, prompts=prompts)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize("form", SCRIPTS)
def test_r083_calls_of_every_family_are_read_whole_and_in_streams(scripted: Scripted, form: str) -> None:
    whole, streamed = scripted.ask(form, form).choices[0], scripted.stream(form, form).choices[0]
    for choice in (whole, streamed):
        assert calls_of(choice) == [("get_weather", ROME), ("stop", {})]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content or None) == ("Sure." if form == "hermes" else None)
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert all(ids)


def test_r083_deltas_carry_index_and_name_once_and_arguments_in_pieces(scripted: Scripted) -> None:
    deltas = [
        call
        for chunk in scripted.ask("hermes", "hermes", stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [(delta.index, delta.function.name) for delta in deltas if delta.id] == [(0, "get_weather"), (1, "stop")]
    assert all(delta.type == "function" for delta in deltas if delta.id)
    assert all(delta.function.name is None for delta in deltas if not delta.id)
    assert len([delta for delta in deltas if delta.index == 0]) > 5
    assert json.loads("".join(delta.function.arguments for delta in deltas if delta.index == 0)) == ROME


@pytest.mark.parametrize("script", OTHERS)
def test_text_that_is_no_call_is_content(scripted: Scripted, script: str) -> None:
    choice = scripted.ask("hermes", script).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (OTHERS[script], None)
    assert choice.finish_reason == "stop"


def test_tool_choice_none_reads_no_calls(scripted: Scripted) -> None:
    choice = scripted.ask("hermes", "hermes", tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (SCRIPTS["hermes"], None)


def test_a_call_that_is_cut_short_is_no_call(scripted: Scripted) -> None:
    choice = scripted.ask("hermes", "hermes", max_tokens=60).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == SCRIPTS["hermes"][:60]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("form", SCRIPTS)
def test_required_makes_any_model_call_something(scripted: Scripted, form: str) -> None:
    for seed in range(3):
        fields = {"tool_choice": "required", "temperature": 1, "seed": seed, "parallel_tool_calls": False}
        choice = scripted.ask(form, "text", **fields).choices[0]
        [(name, arguments)] = calls_of(choice)
        assert name in ("get_weather", "stop")
        assert choice.finish_reason == "tool_calls"
        if name == "get_weather" and "gemma" not in form:
            assert arguments["city"] in ("Rome", "Oslo")
            assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral_args", "json"])
def test_a_named_function_is_called_with_arguments_of_its_schema(scripted: Scripted, form: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for read in (scripted.ask, scripted.stream):
        answer = read(form, "text", tool_choice=choice).choices[0]
        [(name, arguments)] = calls_of(answer)
        assert name == "get_weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        # As OpenAI: who named the function knows that it is called.
        assert answer.finish_reason == "stop"


def test_an_allowed_set_is_all_that_can_be_called(scripted: Scripted) -> None:
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    fields = {"tool_choice": {"type": "allowed_tools", "allowed_tools": only}, "parallel_tool_calls": False}
    choice = scripted.ask("hermes", "hermes", **fields).choices[0]
    assert [name for name, _ in calls_of(choice)] == ["stop"]


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral_args", "json"])
def test_without_parallel_calls_the_answer_ends_with_the_first(scripted: Scripted, form: str) -> None:
    choice = scripted.ask(form, form, parallel_tool_calls=False).choices[0]
    [(name, _)] = calls_of(choice)
    assert name == "get_weather"
    assert scripted.ask(form, "text", parallel_tool_calls=False).choices[0].message.content == "It rains."


def test_strict_tools_hold_the_arguments_to_their_schema(scripted: Scripted) -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    calls = calls_of(scripted.ask("hermes", "malformed", tools=[strict]).choices[0])
    assert calls
    assert all(arguments["city"] in ("Rome", "Oslo") for _, arguments in calls)
    with pytest.raises(openai.BadRequestError, match="strict"):
        scripted.ask("gemma", "text", tools=[strict])


def test_each_of_n_answers_has_calls_of_its_own(scripted: Scripted) -> None:
    answer = scripted.stream("hermes", "hermes", n=2)
    assert [calls_of(choice) for choice in answer.choices] == [[("get_weather", ROME), ("stop", {})]] * 2


@pytest.fixture(scope="module")
def conversations(server: LiveServer) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ROME)}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]


def test_calls_and_their_results_are_sent_back(server: LiveServer, conversations: list[Any]) -> None:
    answer = server.openai.chat.completions.create(
        model="red", messages=conversations, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert calls_of(answer.choices[0])


def test_a_template_without_tools_is_told_of_them_in_plain_messages(
    server: LiveServer, conversations: list[Any]
) -> None:
    with_tools = server.openai.chat.completions.create(
        model="red", messages=conversations, tools=TOOLS, max_tokens=1, extra_body={"return_token_ids": True}
    )
    reply = server.http.post("/detokenize", json={"model": "red", "tokens": with_tools.prompt_token_ids})
    prompt = reply.json()["prompt"]
    assert '"name": "get_weather"' in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}' in prompt
    assert "Result of get_weather: rain" in prompt
