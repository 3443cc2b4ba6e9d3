"""Clients that leave: the work stops, and what it held is free."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graftlm import AsyncLLM
from tests.server.conftest import Files
from tests.server.live_server import DEADLINE_SECONDS, LiveServer, serving

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    """One sequence at a time, so that a request nobody stopped would keep every other one waiting."""
    return AsyncLLM(
        files.base, name="tiny", adapters={"red": files.red, "blue": files.blue}, max_num_seqs=1, kv_cache_bytes=8 << 20
    )


@pytest.fixture(scope="module")
def narrow(llm: AsyncLLM, files: Files) -> Iterator[LiveServer]:
    with serving(llm, adapter_roots=[files.roots]) as live:
        yield live


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def open_request(
    live: LiveServer, path: str, body: dict[str, Any], *, receive_bytes: int | None = None
) -> socket.socket:
    """A connection on which the whole request has been sent and nothing has been read.

    Args:
        receive_bytes: what the system may keep for it until it is read.
    """
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        # Before it connects: the size of the window is agreed on then.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_r081_work_stops_when_the_client_leaves(narrow: LiveServer, llm: AsyncLLM, path: str, stream: bool) -> None:
    free = llm.num_free_blocks
    body = {**LONG, "model": "red", "stream": stream}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    for _ in range(5):
        connection = open_request(narrow, path, body)
        wait_until(lambda: llm.num_free_blocks < free)
        connection.close()
        wait_until(lambda: llm.num_unfinished_requests == 0 and llm.num_free_blocks == free)
    assert narrow.text(model="red", prompt="hello", ignore_eos=True)


def test_r081_a_client_that_leaves_the_queue_is_forgotten(narrow: LiveServer, llm: AsyncLLM) -> None:
    running = open_request(narrow, "/v1/completions", {**LONG, "model": "red"})
    wait_until(lambda: llm.num_unfinished_requests == 1)
    queued = [open_request(narrow, "/v1/completions", {**LONG, "model": "red", "stream": n % 2 == 0}) for n in range(6)]
    wait_until(lambda: llm.num_unfinished_requests == 7)
    for connection in queued:
        connection.close()
    wait_until(lambda: llm.num_unfinished_requests == 1)
    running.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_r052_an_adapter_unloads_though_its_clients_left(narrow: LiveServer, llm: AsyncLLM) -> None:
    texts = []
    for _ in range(2):
        load = {"lora_name": "guest", "lora_path": "nested/blue"}
        assert narrow.http.post("/v1/load_lora_adapter", json=load).status_code == 200
        connections = [
            open_request(narrow, "/v1/completions", {**LONG, "model": "guest", "stream": n % 2 == 0}) for n in range(6)
        ]
        wait_until(lambda: llm.num_unfinished_requests == 6)
        for connection in connections[:3]:
            connection.close()
        assert narrow.http.post("/v1/unload_lora_adapter", json={"lora_name": "guest"}).status_code == 200
        assert narrow.complete(model="guest", prompt="hello").status_code == 404
        for connection in connections[3:]:
            connection.close()
        wait_until(lambda: llm.num_unfinished_requests == 0)
        texts.append(narrow.text(model="blue", prompt="hello"))
    assert texts[0] == texts[1]


def test_r081_every_prompt_of_a_list_is_given_up(narrow: LiveServer, llm: AsyncLLM) -> None:
    connection = open_request(narrow, "/v1/completions", {**LONG, "model": "red", "prompt": ["a", "b", "c"]})
    wait_until(lambda: llm.num_unfinished_requests == 3)
    connection.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_a_list_with_a_refused_prompt_leaves_nothing_running(narrow: LiveServer, llm: AsyncLLM) -> None:
    reply = narrow.complete(model="red", prompt=["a", "b", "x" * 9000], max_tokens=4000, stream=True)
    assert reply.status_code == 400
    wait_until(lambda: llm.num_unfinished_requests == 0)
