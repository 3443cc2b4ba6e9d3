"""Requests that trickle in, and bodies of which there are two readings."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from graftlm import AsyncLLM
from graftlm.server.json_body import MAX_MEMBERS
from graftlm.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, ResponseRequest
from tests.server.conftest import Files
from tests.server.live_server import DEADLINE_SECONDS, LiveServer, error_of, serving
from tests.server.test_disconnect import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    return AsyncLLM(files.base, name="tiny", kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Of the access log."""
    return []


@pytest.fixture(scope="module")
def impatient(llm: AsyncLLM, lines: list[str]) -> Iterator[LiveServer]:
    with serving(llm, receive_timeout=0.2, write_access=lines.append) as live:
        yield live


def connect(live: LiveServer) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), DEADLINE_SECONDS)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def reply_to(live: LiveServer, sent: bytes) -> bytes:
    """What comes back while the client says nothing more."""
    with connect(live) as connection:
        connection.sendall(sent)
        return rest_of(connection)


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD, HEAD + b"content-length: 3\r\n"], ids=len)
def test_a_head_that_does_not_end_in_time_ends_its_connection(impatient: LiveServer, sent: bytes) -> None:
    assert reply_to(impatient, sent) == b""
    assert impatient.text(model="tiny", prompt="x")


def test_so_does_the_head_of_a_later_request(impatient: LiveServer) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        received = b""
        while b'{"status":"ok"}' not in received:
            received += connection.recv(65536)
        connection.sendall(b"GET /health")
        assert rest_of(connection) == b""


@pytest.mark.parametrize("framing", [b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n3\r\n{"])
def test_a_body_that_does_not_end_in_time_is_408(impatient: LiveServer, llm: AsyncLLM, framing: bytes) -> None:
    head, _, body = reply_to(impatient, HEAD + framing).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_a_body_has_one_length(impatient: LiveServer, lines: list[str]) -> None:
    framing = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    head, _, body = reply_to(impatient, HEAD + framing + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 400")
    # The rest is nobody's request.
    assert json.loads(body)["error"]["code"] == "ambiguous_length"
    wait_until(lambda: any('"ambiguous_length"' in line for line in lines))


def post(live: LiveServer, route: str, text: str) -> Any:
    return live.http.post(route, content=text.encode(), headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("route", "text"),
    [
        ("/v1/completions", '{"model": "red", "prompt": "x", "model": "tiny/llama"}'),
        ("/v1/chat/completions", '{"model": "red", "messages": [{"role": "user", "role": "system", "content": "x"}]}'),
        ("/v1/responses", '{"model": "red", "input": "x", "metadata": {"a": "1", "a": "2"}}'),
        ("/tokenize", '{"prompt": "x", "prompt": "y"}'),
        ("/v1/load_lora_adapter", '{"lora_name": "a", "lora_name": "b", "lora_path": "red"}'),
    ],
)
def test_a_key_that_is_there_twice_is_400(server: LiveServer, route: str, text: str) -> None:
    error = error_of(post(server, route, text))
    assert error["code"] == "json_invalid"
    assert "twice" in error["message"]


def schema_body(route: str, schema: str) -> str:
    """A request with a JSON schema in it, by which its reply is not held."""
    if route == "/v1/responses":
        function = f'{{"type": "function", "name": "f", "parameters": {schema}}}'
        return f'{{"model": "red", "input": "x", "max_output_tokens": 2, "tools": [{function}]}}'
    function = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    messages = '[{"role": "user", "content": "x"}]'
    return f'{{"model": "red", "messages": {messages}, "max_tokens": 2, "tools": [{function}]}}'


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\udfff": 1}'])
def test_values_that_no_json_can_carry_back_are_400_naming_the_field(
    server: LiveServer, route: str, value: str
) -> None:
    assert error_of(post(server, route, schema_body(route, f'{{"default": {value}}}')))["param"] == "tools"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_no_depth_of_a_schema_is_the_servers_fault(server: LiveServer, route: str) -> None:
    statuses = []
    for depth in (20, 60, 100, *range(225, 270, 3), 500, 900, 960, 2000, 100_000):
        schema = '{"x":' * depth + "{}" + "}" * depth
        statuses.append(post(server, route, schema_body(route, schema)).status_code)
    assert {*statuses[:3]} == {200}
    assert {*statuses} == {200, 400}
    assert {*statuses[-5:]} == {400}


@pytest.mark.parametrize(
    ("body", "field", "items"),
    [
        (CompletionRequest, "stop", [1]),
        (CompletionRequest, "stop_token_ids", ["1"]),
        (CompletionRequest, "guided_choice", [1]),
        (ChatRequest, "messages", [1]),
        (ChatRequest, "messages", [{"role": "user", "content": [1] * 1000}]),
        (ChatRequest, "tools", [1]),
        (ResponseRequest, "input", [1]),
        (ResponseRequest, "tools", [1]),
        (DetokenizeRequest, "tokens", [-1]),
    ],
    ids=str,
)
def test_of_a_thousand_mistakes_one_is_told(body: type[BaseModel], field: str, items: list[Any]) -> None:
    # To find a million takes half a minute, in which nobody is served.
    with pytest.raises(ValidationError) as refused:
        body.model_validate({field: items * 1000})
    assert len([error for error in refused.value.errors() if error["loc"][0] == field]) == 1


@pytest.mark.parametrize("members", [{f"k{index}": 1 for index in range(MAX_MEMBERS)}, {"tools": [{"a": 1}] * 40_000}])
def test_objects_have_so_many_members_and_no_more(server: LiveServer, members: dict[str, Any]) -> None:
    error = error_of(server.http.post("/v1/chat/completions", json={"model": "red", **members}))
    assert error["code"] == "json_invalid"
    assert str(MAX_MEMBERS) in error["message"]


def test_a_name_of_megabytes_is_not_sent_back(server: LiveServer) -> None:
    for body in ({"model": "red", "prompt": "x", "a" * 10**6: 1}, {"model": "a" * 10**6, "prompt": "x"}):
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code in (400, 404)
        assert len(reply.content) < 2000
