"""A server with more to do than it can: it says so, keeps to its deadlines, and holds no more than it must."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from graftlm import AsyncLLM
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, open_request, wait_until


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    """One answer at a time, and two may wait."""
    return AsyncLLM(files.base, name="tiny", max_num_seqs=1, max_queued_requests=2, kv_cache_bytes=8 << 20)


@pytest.fixture(scope="module")
def busy(llm: AsyncLLM) -> Iterator[LiveServer]:
    with serving(llm, request_timeout=30, send_bytes=4096) as live:
        yield live


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line not in ("", "data: [DONE]")]


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_its_queue_the_server_says_429_and_when_to_come_back(
    busy: LiveServer, llm: AsyncLLM, stream: bool
) -> None:
    connections = [open_request(busy, "/v1/completions", {**LONG, "model": "tiny"}) for _ in range(3)]
    wait_until(lambda: llm.num_unfinished_requests == 3)
    reply = busy.complete(model="tiny", prompt="x", stream=stream)
    error = error_of(reply, 429)
    assert error["code"] == "engine_overloaded"
    assert error["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        busy.openai.completions.create(model="tiny", prompt="x")
    # What was accepted is not hurt, and a list of prompts is taken as a whole or not at all.
    connections.pop().close()
    wait_until(lambda: llm.num_unfinished_requests == 2)
    assert busy.complete(model="tiny", prompt=["x", "y"]).status_code == 429
    wait_until(lambda: llm.num_unfinished_requests == 2)
    for connection in connections:
        connection.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)
    assert busy.text(model="tiny", prompt="x", ignore_eos=True)


def test_a_request_out_of_time_is_504_and_its_stream_ends_with_an_error_event(busy: LiveServer, llm: AsyncLLM) -> None:
    whole = busy.complete(**LONG, model="tiny", timeout=0.05)
    error = error_of(whole, 504)
    assert error["code"] == "deadline_exceeded"
    assert "0.05 seconds" in error["message"]
    stream = busy.complete(**LONG, model="tiny", timeout=1, stream=True)
    assert stream.status_code == 200
    *answers, last = events(stream.text)
    assert answers
    assert last["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in stream.text
    chat = busy.chat(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=8000, timeout=0.05)
    error_of(chat, 504)
    wait_until(lambda: llm.num_unfinished_requests == 0)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_stream_that_is_out_of_time_before_its_first_token_is_504_and_no_stream(
    busy: LiveServer, llm: AsyncLLM, path: str, asked: dict[str, Any]
) -> None:
    ahead = open_request(busy, "/v1/completions", {**LONG, "model": "tiny"})
    wait_until(lambda: llm.num_unfinished_requests == 1)
    reply = busy.http.post(path, json={**asked, "model": "tiny", "stream": True, "timeout": 0.05})
    assert error_of(reply, 504)["code"] == "deadline_exceeded"
    assert reply.headers["content-type"] == "application/json"
    ahead.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_a_client_that_leaves_before_its_streams_first_token_leaves_nothing(busy: LiveServer, llm: AsyncLLM) -> None:
    ahead = open_request(busy, "/v1/completions", {**LONG, "model": "tiny"})
    wait_until(lambda: llm.num_unfinished_requests == 1)
    behind = open_request(busy, "/v1/completions", {**LONG, "model": "tiny", "stream": True})
    wait_until(lambda: llm.num_unfinished_requests == 2)
    behind.close()
    wait_until(lambda: llm.num_unfinished_requests == 1)
    ahead.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_a_request_out_of_time_while_it_waits_leaves_the_one_ahead_alone(busy: LiveServer, llm: AsyncLLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(busy.complete, model="tiny", prompt="x", max_tokens=400, ignore_eos=True)
        wait_until(lambda: llm.num_unfinished_requests == 1)
        error_of(busy.complete(model="tiny", prompt="x", timeout=0.02), 504)
        assert ahead.result().json()["usage"]["completion_tokens"] == 400


def test_a_request_may_have_less_time_than_the_server_gives_but_not_more(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=8 << 20)
    with serving(llm, request_timeout=0.1) as live:
        assert "0.1 seconds" in error_of(live.complete(**LONG, model="tiny"), 504)["message"]
        assert "0.1 seconds" in error_of(live.complete(**LONG, model="tiny", timeout=60), 504)["message"]
        assert "0.05 seconds" in error_of(live.complete(**LONG, model="tiny", timeout=0.05), 504)["message"]


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_timeout_that_is_none_is_refused(busy: LiveServer, timeout: object) -> None:
    assert error_of(busy.complete(model="tiny", prompt="x", timeout=timeout))["param"] == "timeout"


def test_a_client_that_does_not_read_gets_everything_when_it_does(busy: LiveServer, llm: AsyncLLM) -> None:
    # With its log-probabilities an answer is larger than what the sockets between us hold.
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "logprobs": 20}
    whole: httpx.Response = busy.http.post("/v1/completions", json=body)
    connection = open_request(busy, "/v1/completions", {**body, "stream": True}, receive_bytes=4096)
    # The work is done and its blocks are free although nobody has read a byte.
    wait_until(lambda: llm.num_unfinished_requests == 1)
    wait_until(lambda: llm.num_unfinished_requests == 0)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1 << 20)
    connection.close()
    text = received.decode().partition("\r\n\r\n")[2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in re.findall(r"data: \{.*\}", text)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    [expected] = whole.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    joined = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert joined == expected["logprobs"]["token_logprobs"]
    # Many tokens came in one event: those of which nobody had read anything.
    assert len(chunks) < 1000
