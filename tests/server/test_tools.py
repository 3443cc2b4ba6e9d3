"""Functions that a model calls, as the openai client sees them (R083)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from graftlm import AsyncLLM
from tests.server.live_server import LiveServer, error_of, serving
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
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
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
    "report": '{"weather": "rain"}',
    "wrong": '{"weather": "fog"}',
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

    def respond(self, form: str, script: str, **fields: Any) -> Response:
        """A response, valid by the client's own types."""
        fields = {"tools": FLAT_TOOLS, "temperature": 0, "max_output_tokens": 200, **fields}
        body = {"model": form, "input": self.prompts[script], **fields}
        reply = self.server.http.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        return Response.model_validate(reply.json(), strict=True)

    def events(self, form: str, script: str, **fields: Any) -> list[Any]:
        """Events, valid by the client's own types."""
        fields = {"tools": FLAT_TOOLS, "temperature": 0, "max_output_tokens": 200, **fields}
        events = list(
            self.server.openai.responses.create(model=form, input=self.prompts[script], stream=True, **fields)
        )
        for event in events:
            EVENTS.validate_python(event.model_dump(), strict=True)
        return events

    def accumulated(self, form: str, script: str) -> Any:
        """The response that the client's own accumulator makes of a stream."""
        fields: Any = {"tools": FLAT_TOOLS, "temperature": 0, "max_output_tokens": 200}
        with self.server.openai.responses.stream(model=form, input=self.prompts[script], **fields) as stream:
            return stream.get_final_response()


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


def items_of(response: Response) -> list[tuple[str, Any]]:
    """Texts, and names of functions with their arguments, in the order of the output."""
    items: list[Any] = list(response.output)
    assert len({item.id for item in items}) == len(items)
    return [
        ("text", item.content[0].text) if item.type == "message" else (item.name, json.loads(item.arguments))
        for item in items
    ]


@pytest.mark.parametrize("form", SCRIPTS)
def test_responses_have_calls_of_every_family_as_items(scripted: Scripted, form: str) -> None:
    for response in (scripted.respond(form, form), scripted.accumulated(form, form)):
        said = [("text", "Sure.")] if form == "hermes" else []
        assert items_of(response) == [*said, ("get_weather", ROME), ("stop", {})]
        assert response.status == "completed"
        calls = response.output[len(said) :]
        assert len({call.call_id for call in calls}) == 2
        assert [tool.name for tool in response.tools] == ["get_weather", "stop"]


def test_events_of_a_response_build_up_its_items(scripted: Scripted) -> None:
    events = scripted.events("hermes", "hermes")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert (own[0].item.id, own[0].item.status) == (item.id, "in_progress")
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    weather = final.output[1]
    deltas = [event.delta for event in arguments if event.item_id == weather.id]
    assert len(deltas) > 5
    assert "".join(deltas) == weather.arguments
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [weather.arguments, "{}"]


@pytest.mark.parametrize("script", ["text", "malformed", "unknown"])
def test_what_is_no_call_is_text_of_a_response(scripted: Scripted, script: str) -> None:
    whole, streamed = scripted.respond("hermes", script), scripted.events("hermes", script)[-1].response
    assert items_of(whole) == items_of(streamed) == [("text", OTHERS[script])]


def test_a_call_that_is_cut_short_is_text_of_an_incomplete_response(scripted: Scripted) -> None:
    events = scripted.events("hermes", "hermes", max_output_tokens=60)
    whole = scripted.respond("hermes", "hermes", max_output_tokens=60)
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.output_text == SCRIPTS["hermes"][:60]
        assert not any(item.type == "function_call" for item in response.output)
    [given_up] = [
        event.item
        for event in events
        if event.type == "response.output_item.done" and event.item.type == "function_call"
    ]
    assert given_up.status == "incomplete"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=str,
)
def test_a_response_keeps_to_its_tool_choice(scripted: Scripted, choice: Any) -> None:
    response = scripted.respond("json", "text", tool_choice=choice, parallel_tool_calls=False, temperature=1)
    [(name, arguments)] = items_of(response)
    assert name in ("get_weather", "stop")
    if choice != "required":
        assert name == "get_weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert response.model_dump(exclude_none=True)["tool_choice"] == choice


def test_a_response_may_not_call_what_it_is_told_not_to(scripted: Scripted) -> None:
    assert items_of(scripted.respond("hermes", "hermes", tool_choice="none")) == [("text", SCRIPTS["hermes"])]


REPORT = {"type": "object", "properties": {"weather": {"$ref": "#/$defs/w"}}, "required": ["weather"]}
REPORT |= {"additionalProperties": False, "$defs": {"w": {"enum": ["rain", "sun"]}}}


@pytest.mark.parametrize("form", SCRIPTS)
def test_beside_tools_an_answer_that_calls_nothing_keeps_to_its_form(scripted: Scripted, form: str) -> None:
    chat: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}}
    response: Any = {"text": {"format": {"type": "json_schema", "name": "report", "schema": REPORT}}}
    assert scripted.ask(form, "report", **chat).choices[0].message.content == OTHERS["report"]
    assert scripted.stream(form, "report", **chat).choices[0].message.content == OTHERS["report"]
    assert items_of(scripted.respond(form, "report", **response)) == [("text", OTHERS["report"])]
    # It would say "fog" else.
    assert items_of(scripted.respond(form, "wrong", **response)) == [("text", OTHERS["report"])]
    called = calls_of(scripted.ask(form, form, **chat).choices[0])
    assert called[0][0] == "get_weather"


def test_other_forms_than_json_are_refused_beside_tools(scripted: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="guided_regex and tools") as error:
        scripted.ask("hermes", "text", extra_body={"guided_regex": "a+"})
    assert error.value.param == "guided_regex"


def test_calls_and_their_results_are_sent_back_as_items(server: LiveServer, conversations: list[Any]) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": json.dumps(ROME)}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    items = [{"role": "user", "content": "Weather?"}, {**call, "id": "fc_1", "status": "completed"}, result]
    chat = server.openai.chat.completions.create(
        model="red", messages=conversations, tools=TOOLS, max_tokens=20, temperature=0, tool_choice="none"
    )
    for output in ("rain", [{"type": "input_text", "text": "rain"}]):
        sent = [*items[:2], {**result, "output": output}]
        response = server.openai.responses.create(
            model="red", input=sent, tools=FLAT_TOOLS, max_output_tokens=20, temperature=0, tool_choice="none"
        )
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_what_the_node_client_has_read_may_come_back_with_what_it_was_read_from(server: LiveServer) -> None:
    call = {"name": "get_weather", "arguments": json.dumps(ROME), "parsed_arguments": ROME}
    result = {"call_id": "call_1", "output": [{"type": "output_text", "text": "{}", "parsed": {}}]}
    item = {"type": "function_call", "call_id": "call_1", **call}
    body = {"model": "red", "input": [item, {"type": "function_call_output", **result}], "max_output_tokens": 2}
    assert server.http.post("/v1/responses", json=body).status_code == 200
    calls = [{"id": "call_1", "type": "function", "function": call}]
    assert server.chat(model="red", messages=[{"role": "assistant", "tool_calls": calls, "parsed": None}]).is_success
    assert server.chat(model="red", messages=[{"role": "assistant", "content": "{}", "parsed": {}}]).is_success


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": [FLAT_TOOLS[0]] * 2}, "tools"),
        ({"tools": [{**FLAT_TOOLS[1], "defer_loading": True}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": FLAT_TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "no"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": ["text"]}, "input"),
    ],
    ids=str,
)
def test_tools_of_responses_that_are_not_offered_are_400(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        error = error_of(
            server.http.post("/v1/responses", json={"model": "red", "input": "x", "stream": stream} | fields)
        )
        assert error["param"] == param
