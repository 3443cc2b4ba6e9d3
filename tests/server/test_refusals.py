"""Requests that are refused: each by name, with the same status streamed or not, and with the server alive after it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import CONTEXT
from tests.server.live_server import LiveServer, error_of

PROMPT = "hello"
MESSAGES = [{"role": "user", "content": "hello"}]
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def body_for(route: str, **fields: Any) -> dict[str, Any]:
    subject = {"prompt": PROMPT} if route == "/v1/completions" else {"messages": MESSAGES}
    return {"model": "red", "max_tokens": 2, **subject, **fields}


def post_both(live: LiveServer, route: str, fields: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a body, which must be the same with and without a stream."""
    errors = []
    for stream in (False, True):
        body = json.dumps(body_for(route, stream=stream) | fields)
        reply = live.http.post(route, content=body, headers={"content-type": "application/json"})
        errors.append(error_of(reply, status))
    assert errors[0] == errors[1]
    return errors[0]


TOOL = {"type": "function", "function": {"name": "f"}}
SETS = {"type": "array", "uniqueItems": True}
STRICT_SETS = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SETS}}
SCHEMA_OF_SETS = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SETS}}}
CALL_WITHOUT_JSON = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "Infinity"}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": "a"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"temprature": 0.5}, "temprature"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"guided_json": {"type": "strng"}}, "guided_json"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (SCHEMA_OF_SETS, "response_format"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"made_up": True}}, "stream_options"),
    ],
    ids=str,
)
def test_r066_r069_r078_r080_r084_r098_bad_values_are_400_naming_the_field(
    server: LiveServer, route: str, fields: dict[str, Any], param: str
) -> None:
    error = post_both(server, route, fields)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [STRICT_SETS]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL_WITHOUT_JSON]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ],
    ids=str,
)
def test_r077_r083_what_chat_does_not_offer_is_400_naming_the_field(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    error = post_both(server, "/v1/chat/completions", fields)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a"] * 600, "n": 2}, "n"),
        ({"prompt": ["a"] * 2000}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_completions_does_not_offer_is_400_naming_the_field(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    assert post_both(server, "/v1/completions", fields)["param"] == param


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["", "a"], ["a", ""], ["a", 1], [1, "a"], [[1], 2], None, 3, {"a": 1}, [None]],
    ids=str,
)
def test_r079_a_prompt_that_is_none_is_400(server: LiveServer, prompt: object) -> None:
    assert post_both(server, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[[1, 259]], [-1], [2**31], [2**63], [2**70], [1.5], [True], [[1, "2"]]], ids=str)
def test_r022_ids_outside_the_vocabulary_are_400(server: LiveServer, prompt: object) -> None:
    assert post_both(server, "/v1/completions", {"prompt": prompt})["param"] == "prompt"
    assert post_both(server, "/v1/completions", {"prompt": prompt, "echo": True})["param"] == "prompt"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model", ["nope", "", "Red", "red ", " red", "../../x", "tiny", "llama", "base", "red\x00"])
def test_r072_r096_unknown_model_is_404(server: LiveServer, route: str, model: str) -> None:
    error = post_both(server, route, {"model": model}, status=404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert model.strip().replace("\x00", "\\x00") in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_r072_a_missing_model_is_400(server: LiveServer, route: str) -> None:
    body = body_for(route)
    del body["model"]
    error = error_of(server.http.post(route, json=body))
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
    assert error_of(server.http.post(route, json={**body, "model": None}))["param"] == "model"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "ann", "metadata": {"a": "b"}},
        {"stream_options": None, "stop": None, "logit_bias": None, "temperature": None, "n": None, "seed": None},
        {"stop": []},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"temperature": 2, "n": 1},
        {"logit_bias": {"5": -100}},
        {"seed": -5},
    ],
    ids=str,
)
def test_r084_boundary_values_and_empty_fields_are_fine(server: LiveServer, route: str, fields: dict[str, Any]) -> None:
    reply = server.http.post(route, json=body_for(route, **fields))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "functions": None, "function_call": None, "tool_choice": None},
        {"response_format": {"type": "text"}, "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"logprobs": False, "top_logprobs": None, "reasoning_effort": None, "prediction": None},
    ],
    ids=str,
)
def test_fields_that_ask_for_nothing_are_accepted_in_chat(server: LiveServer, fields: dict[str, Any]) -> None:
    reply = server.http.post("/v1/chat/completions", json=body_for("/v1/chat/completions", **fields))
    assert reply.status_code == 200, reply.text


def test_fields_that_ask_for_nothing_are_accepted_in_completions(server: LiveServer) -> None:
    reply = server.complete(model="red", prompt=PROMPT, best_of=1, suffix=None, echo=False, logprobs=None)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("route", ROUTES)
def test_r071_stream_options_without_a_stream_is_400(server: LiveServer, route: str) -> None:
    reply = server.http.post(route, json=body_for(route, stream_options={"include_usage": True}))
    assert error_of(reply)["param"] == "stream_options"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "red", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "red", "\\ud800": 1}',
        b'{"model": "\\ud800", "prompt": "x", "messages": []}',
    ],
    ids=lambda body: repr(body)[:30],
)
def test_bodies_that_are_no_request_are_400(server: LiveServer, route: str, body: bytes) -> None:
    error_of(server.http.post(route, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("field", ["prompt", "stop", "user"])
def test_half_a_surrogate_pair_is_400(server: LiveServer, field: str) -> None:
    body = json.dumps(body_for("/v1/completions", **{field: "a\ud800"}))
    reply = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(reply)["param"] == field


def test_a_body_that_is_not_declared_as_json_is_415(server: LiveServer) -> None:
    reply = server.http.post("/v1/completions", content=json.dumps(body_for("/v1/completions")))
    assert "application/json" in error_of(reply, 415)["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_413(server: LiveServer, declared: bool) -> None:
    piece = b" " * (1 << 20)
    content: Any = piece * 9 if declared else (piece for _ in range(9))
    reply = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert error_of(reply, 413)["code"] == "request_too_large"
    assert server.text(model="red", prompt=PROMPT)


def test_routes_and_methods_that_do_not_exist_have_the_same_error_shape(server: LiveServer) -> None:
    assert "/v1/embeddings" in error_of(server.http.post("/v1/embeddings", json={}), 404)["message"]
    error_of(server.http.get("/nowhere"), 404)
    reply = server.http.get("/v1/completions")
    assert error_of(reply, 405)["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


def test_a_failure_nobody_foresaw_is_500_without_its_cause(server: LiveServer) -> None:
    async def fail() -> None:
        raise RuntimeError("the secret of the inside")

    server.app.add_api_route("/fail", fail)
    # Not the shared client: uvicorn drops the connection after a failure.
    reply = httpx.get(f"{server.url}/fail")
    assert error_of(reply, 500)["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text


def test_the_openapi_description_knows_the_bodies(server: LiveServer) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_the_openai_client_raises_its_own_exceptions(server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(model="nope", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.completions.create(model="red", prompt=PROMPT, stream=True, top_p=3)
    assert bad.value.param == "top_p"


def test_r085_prompt_and_answer_must_fit_the_context(short_server: LiveServer) -> None:
    ids = [97] * 500
    assert short_server.complete(model="tiny", prompt=ids[:127], max_tokens=1).status_code == 200
    for num_ids, max_tokens in ((128, 1), (500, 1), (100, 100)):
        fields = {"model": "tiny", "prompt": ids[:num_ids], "max_tokens": max_tokens}
        error = post_both(short_server, "/v1/completions", fields)
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"]
        assert str(num_ids) in error["message"]


def test_r087_without_a_limit_an_almost_full_context_is_no_error(short_server: LiveServer) -> None:
    for num_ids, num_generated in ((100, 16), (120, 8), (127, 1)):
        body = {"model": "tiny", "prompt": [97] * num_ids, "ignore_eos": True}
        reply = short_server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == num_generated
    body = {"model": "tiny", "prompt": [97] * 128}
    assert error_of(short_server.http.post("/v1/completions", json=body))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["a" * 10**6, [97] * 10**5], ids=["text", "ids"])
def test_r086_far_too_long_prompts_are_refused_with_little_work(
    short_server: LiveServer, prompt: object, stream: bool
) -> None:
    # The processor time of client and server together, which does not depend on what else the machine is doing.
    started = time.process_time()
    error = error_of(short_server.complete(model="red", prompt=prompt, stream=stream))
    assert time.process_time() - started < 1
    assert error["code"] == "context_length_exceeded"
    assert "128" in error["message"]


def test_r086_a_prompt_of_a_million_characters_is_too_long_for_any_context(server: LiveServer) -> None:
    error = error_of(server.complete(model="red", prompt="a" * 10**6))
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]


def test_the_server_is_alive_after_all_that(server: LiveServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.text(model="tiny/llama", prompt=PROMPT)
