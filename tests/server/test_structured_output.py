"""Answers of a given form over HTTP, as the openai client asks for them (R077)."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.conftest import CONTEXT
from tests.server.live_server import LiveServer


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=6)
    admin: bool


SCHEMA = Person.model_json_schema()
MESSAGES: list[Any] = [{"role": "user", "content": "who?"}]
FORMS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}},
}
OTHER_FORMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"guided_regex": "a{3}|b"}, ("aaa", "b")),
    ({"guided_choice": ["left", "right"]}, ("left", "right")),
    ({"guided_grammar": 'start: "x" ("y" | "z")'}, ("xy", "xz")),
    ({"structured_outputs": {"regex": "a{3}|b"}}, ("aaa", "b")),
    ({"structured_outputs": {"choice": ["left"]}}, ("left",)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["tiny/llama", "red"])
def test_r077_every_spelling_of_a_schema_is_enforced_on_both_routes(server: LiveServer, model: str, form: str) -> None:
    for seed in range(3):
        body = {"model": model, "temperature": 1, "seed": seed, "max_tokens": 200, **FORMS[form]}
        chat = server.chat(messages=MESSAGES, **body).json()["choices"][0]
        completion = server.complete(prompt="who?", **body).json()["choices"][0]
        for text, choice in ((chat["message"]["content"], chat), (completion["text"], completion)):
            Person.model_validate_json(text)
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("fields", "expected"), OTHER_FORMS, ids=str)
def test_expressions_choices_and_grammars_are_enforced(
    server: LiveServer, fields: dict[str, Any], expected: tuple[str, ...]
) -> None:
    for seed in range(4):
        body = {"model": "red", "temperature": 1, "seed": seed, "max_tokens": 20, **fields}
        assert server.chat(messages=MESSAGES, **body).json()["choices"][0]["message"]["content"] in expected
        assert server.text(prompt="who?", **body) in expected


def test_the_clients_parse_method_gives_an_object(server: LiveServer) -> None:
    answer = server.openai.chat.completions.parse(
        model="red", messages=MESSAGES, response_format=Person, max_completion_tokens=200, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    response = server.openai.responses.parse(model="red", input="who?", text_format=Person, max_output_tokens=200)
    assert isinstance(response.output_parsed, Person)


def test_a_stream_is_the_answer_in_pieces(server: LiveServer) -> None:
    fields: dict[str, Any] = {
        "model": "red",
        "messages": MESSAGES,
        "seed": 3,
        "max_tokens": 200,
        **FORMS["response_format"],
    }
    whole = server.openai.chat.completions.create(**fields).choices[0].message.content
    chunks = list(server.openai.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_json_mode_gives_an_object(server: LiveServer) -> None:
    answer = server.openai.chat.completions.create(
        model="red", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=CONTEXT // 4, seed=2
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_a_refusal_says_why_in_few_words_and_names_the_field(server: LiveServer) -> None:
    sets: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as error:
        server.openai.chat.completions.create(model="red", messages=MESSAGES, response_format=sets)
    assert error.value.param == "response_format"
    assert "uniqueItems" in str(error.value)
    assert len(str(error.value)) < 500
