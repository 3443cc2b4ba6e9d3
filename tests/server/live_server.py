"""A real server on a free port of this machine, in a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from graftlm import AsyncLLM
from graftlm.server import create_app
from graftlm.server.arrival import RECEIVE_TIMEOUT
from graftlm.server.http_server import HTTPServer, bind, url_of

DEADLINE_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """What a test holds of a running server: its address and two clients."""

    url: str
    http: httpx.Client
    openai: openai.OpenAI
    app: Any
    server: HTTPServer

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"temperature": 0, "max_tokens": 8, **body})

    def text(self, **body: Any) -> str:
        reply = self.complete(**body)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"temperature": 0, "max_tokens": 8, **body})


@contextmanager
def serving(
    llm: AsyncLLM,
    *,
    adapter_roots: Sequence[Path] = (),
    drain_seconds: float = 0,
    send_bytes: int | None = None,
    receive_timeout: float = RECEIVE_TIMEOUT,
    **app_options: Any,
) -> Iterator[LiveServer]:
    """Serve `llm` until the block ends, then shut it down.

    Args:
        send_bytes: what the system may keep of a reply until its client reads.
    """
    app = create_app(
        llm,
        adapter_roots=adapter_roots,
        enable_adapter_loading=bool(adapter_roots),
        receive_timeout=receive_timeout,
        **app_options,
    )
    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    url = url_of(listener)
    server = HTTPServer(app, llm, drain_seconds=drain_seconds, receive_timeout=receive_timeout, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server under test")
    thread.start()
    try:
        assert ready.wait(DEADLINE_SECONDS)
        with (
            httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_SECONDS) as client,
        ):
            yield LiveServer(url=url, http=http, openai=client, app=app, server=server)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a reply that must have this status and OpenAI's error shape."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
