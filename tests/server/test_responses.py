"""/v1/responses, read by the `openai` client and checked against its types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from graftlm import AsyncLLM
from tests.engine.rig import stepwise
from tests.engine.test_step_failure import breaking
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
INPUT: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}


def create(live: LiveServer, **fields: Any) -> Response:
    """A response, valid by the client's own types."""
    reply = live.http.post("/v1/responses", json={"model": "red", "input": "hello", **GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    return Response.model_validate(reply.json(), strict=True)


def chat_text(live: LiveServer, messages: list[Any]) -> str:
    text: str = live.chat(model="red", messages=messages, max_tokens=12).json()["choices"][0]["message"]["content"]
    return text


def test_a_response_is_the_chat_of_its_instructions_and_input(server: LiveServer) -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert create(server).output_text == chat_text(server, hello)
    system = {"role": "system", "content": "Be brief."}
    assert create(server, instructions="Be brief.").output_text == chat_text(server, [system, *hello])
    assert create(server, input=INPUT).output_text == chat_text(server, [system, *hello])


def test_what_was_asked_for_comes_back_with_usage_and_status(server: LiveServer) -> None:
    response = create(server, metadata={"a": "b"}, user="ann", top_p=0.5)
    assert (response.metadata, response.user, response.top_p, response.model) == ({"a": "b"}, "ann", 0.5, "red")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (12, response.usage.input_tokens + 12)
    stopped = create(server, stop=[response.output_text[2]])
    assert (stopped.status, stopped.output_text, stopped.incomplete_details) == (
        "completed",
        response.output_text[: response.output_text.index(response.output_text[2])],
        None,
    )


def test_an_earlier_response_can_be_sent_back_as_input(server: LiveServer) -> None:
    first = create(server)
    items = [item.model_dump() for item in first.output]
    again = create(server, input=[*INPUT, *items, {"role": "user", "content": "more"}])
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    assert again.output_text == chat_text(server, turns)


@pytest.mark.parametrize("fields", [GREEDY, {"temperature": 1.2, "extra_body": {"seed": 3}, "max_output_tokens": 30}])
def test_events_lead_up_to_the_whole_response(server: LiveServer, fields: dict[str, Any]) -> None:
    asked: Any = {"model": "blue", "input": INPUT, "include": ["message.output_text.logprobs"], **fields}
    whole = server.openai.responses.create(**asked, top_logprobs=2)
    events = list(server.openai.responses.create(**asked, top_logprobs=2, stream=True))
    for event in events:
        EVENTS.validate_python(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    last: Any = events[-1]
    deltas: list[Any] = events[4:-4]
    assert "".join(delta.delta for delta in deltas) == whole.output_text == last.response.output_text
    part: Any = whole.output[0]
    assert sum(len(delta.logprobs) for delta in deltas) == len(part.content[0].logprobs)
    assert [len(entry.top_logprobs) for entry in part.content[0].logprobs] == [2] * len(part.content[0].logprobs)
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert [entry.token for entry in last.response.output[0].content[0].logprobs] == [
        entry.token for entry in part.content[0].logprobs
    ]


def test_an_event_is_with_the_client_before_the_next_step_begins(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=1 << 20)
    body = {"model": "tiny", "input": "x", "stream": True, "max_output_tokens": 2, "include": [INCLUDED]}
    with serving(llm) as live, stepwise(llm) as permit_step:
        permit_step()
        with live.http.stream("POST", "/v1/responses", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("event: "))
            while next(lines) != "event: response.output_text.delta":
                pass
            permit_step()
            assert next(lines) == "event: response.output_text.delta"
            assert list(lines)[-1] == "event: response.incomplete"


INCLUDED = "message.output_text.logprobs"


def test_a_step_that_fails_is_the_last_event(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=1 << 20)
    with serving(llm) as live, stepwise(llm) as permit_step:
        permit_step()
        events = iter(live.openai.responses.create(model="tiny", input="x", stream=True))
        assert next(events).type == "response.created"
        with breaking(llm, RuntimeError("a secret of the inside")):
            permit_step()
            last: Any = list(events)[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert "the engine failed" in last.response.error.message
    assert "secret" not in last.model_dump_json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_p": 0}, "top_p"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"stream_options": {"include_obfuscation": False}, "stream": False}, "stream_options"),
    ],
    ids=str,
)
def test_what_is_not_offered_is_400_naming_the_field(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    body = {"model": "red", "input": "hello", **GREEDY}
    for stream in (False, True):
        error = error_of(server.http.post("/v1/responses", json={**body, "stream": stream, **fields}))
        assert error["param"] == param


def test_r072_an_unknown_model_is_404(server: LiveServer) -> None:
    error = error_of(server.http.post("/v1/responses", json={"model": "nope", "input": "x", "stream": True}), 404)
    assert error["code"] == "model_not_found"
