"""Every field that the `openai` client can send is honoured, or refused by its name. What each honoured field does is
tested where its route is."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from graftlm.server.fields import harmless_values
from graftlm.server.schemas import REQUEST_BODIES
from tests.server.live_server import LiveServer, error_of
from tests.server.test_refusals import body_for

ROUTES: dict[str, Any] = {
    "/v1/completions": completions.CompletionCreateParamsStreaming,
    "/v1/chat/completions": chat.CompletionCreateParamsStreaming,
    "/v1/responses": responses.ResponseCreateParamsStreaming,
}
# A value of each honoured field that asks for something.
ASKED: dict[str, Any] = {
    "frequency_penalty": 1.5,
    "logit_bias": {"65": 5},
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "messages": [{"role": "developer", "content": "hi"}],
    "metadata": {"a": "b"},
    "model": "blue",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": -1,
    "response_format": {"type": "json_object"},
    "prompt": [[1, 2], [3]],
    "prompt_cache_key": "mine",
    "safety_identifier": "ann",
    "seed": 7,
    "stop": ["a", "b", "c", "d", "e"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_logprobs": 3,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_p": 0.5,
    "user": "ann",
}
ASKED_OF: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 3, "echo": True},
    "/v1/chat/completions": {"logprobs": True},
    "/v1/responses": {
        "include": ["message.output_text.logprobs"],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "boolean"}}},
        "tools": [{"type": "function", "name": "f"}],
    },
}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"stream_options": {"stream": True}},
    "/v1/chat/completions": {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}},
    "/v1/responses": {
        "stream_options": {"stream": True},
        "top_logprobs": {"include": ["message.output_text.logprobs"]},
    },
}


def all_fields(params: Any) -> set[str]:
    return {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}


FIELDS = [(route, name) for route, params in ROUTES.items() for name in sorted(all_fields(params))]


def plain(route: str, **fields: Any) -> dict[str, Any]:
    """A short request."""
    if route == "/v1/responses":
        return {"model": "red", "input": "hello", "max_output_tokens": 2, **fields}
    return body_for(route, **fields)


@pytest.mark.parametrize(("route", "name"), FIELDS)
def test_each_field_of_the_openai_client_is_honoured_or_refused_by_name(
    server: LiveServer, route: str, name: str
) -> None:
    model = REQUEST_BODIES[route]
    if name in model.model_fields and harmless_values(model, name) is None:
        asked = {**ASKED, **ASKED_OF[route]}[name]
        body = plain(route, **NEEDED[route].get(name, {}))
        if name == "max_completion_tokens":
            del body["max_tokens"]
        reply = server.http.post(route, json=body | {name: asked})
        assert reply.status_code == 200, reply.text
    else:
        error = error_of(server.http.post(route, json=plain(route, **{name: {"something": "else"}})))
        assert error["param"] == name
        assert name in error["message"]
        assert error["code"] in ("unsupported_parameter", "unknown_parameter")
        known = harmless_values(model, name) if name in model.model_fields else None
        for harmless in known or ():
            assert server.http.post(route, json=plain(route, **{name: harmless})).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["use_beam_search", "truncate_prompt_tokens", "length_penalty", "allowed_token_ids"])
def test_fields_of_vllms_that_are_not_offered_are_refused_by_name(server: LiveServer, route: str, name: str) -> None:
    error = error_of(server.http.post(route, json=plain(route, **{name: 7})))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/moderations", "/v1/batches"])
def test_routes_of_openais_that_are_not_offered_say_so(server: LiveServer, path: str) -> None:
    error = error_of(server.http.post(path, json={"model": "red", "input": "x"}), 404)
    assert error["code"] == "route_not_found"
    assert f"{path} is not offered" in error["message"]
