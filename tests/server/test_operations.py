"""What operators rely on: probes, request ids and the access log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from graftlm import AsyncLLM
from tests.engine.test_step_failure import breaking
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, open_request, wait_until

CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    return AsyncLLM(files.base, name="tiny", adapters={"red": files.red}, kv_cache_bytes=8 << 20)


@pytest.fixture(scope="module")
def live(llm: AsyncLLM, lines: list[str]) -> Iterator[LiveServer]:
    with serving(llm, write_access=lines.append, max_body_bytes=4096) as running:
        yield running


def logged(lines: list[str], request_id: str) -> dict[str, Any]:
    """The log's only line of a request."""
    entries = [json.loads(line) for line in lines]
    [entry] = [entry for entry in entries if entry["request_id"] == request_id]
    return dict(entry)


def test_a_server_that_drains_is_alive_and_not_ready_and_finishes_what_it_has(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=8 << 20)
    with ThreadPoolExecutor(1) as pool, serving(llm, drain_seconds=30) as live:
        assert live.http.get("/ready").json() == {"status": "ready"}
        running = pool.submit(live.complete, model="tiny", prompt="x", max_tokens=600, ignore_eos=True)
        wait_until(lambda: llm.num_unfinished_requests == 1)
        live.server.should_exit = True
        wait_until(lambda: not llm.is_running)
        assert error_of(live.http.get("/ready"), 503)["code"] == "engine_closed"
        assert live.http.get("/health").status_code == 200
        error_of(live.complete(model="tiny", prompt="x"), 503)
        assert running.result().json()["usage"]["completion_tokens"] == 600


REPLIES: dict[str, tuple[int, Any]] = {
    "a whole answer": (200, lambda live, **h: post(live, h, prompt="x")),
    "a stream": (200, lambda live, **h: post(live, h, prompt="x", stream=True)),
    "models": (200, lambda live, **h: live.http.get("/v1/models", **h)),
    "a bad field": (400, lambda live, **h: post(live, h, prompt="x", nonsense=1)),
    "an unknown model": (404, lambda live, **h: post(live, h, prompt="x", model="nobody")),
    "no route": (404, lambda live, **h: live.http.get("/nowhere", **h)),
    "another method": (405, lambda live, **h: live.http.delete("/v1/completions", **h)),
    "a large body": (413, lambda live, **h: post(live, h, prompt="x" * 5000)),
}


def post(live: LiveServer, headers: dict[str, Any], **body: Any) -> httpx.Response:
    return live.http.post("/v1/completions", json={"model": "red", "max_tokens": 4, **body}, **headers)


@pytest.mark.parametrize("case", REPLIES)
def test_every_reply_carries_the_requests_id_and_so_does_its_log_line(
    live: LiveServer, lines: list[str], case: str
) -> None:
    status, ask = REPLIES[case]
    request_id = f"test/{list(REPLIES).index(case)}"
    reply = ask(live, headers={"x-request-id": request_id})
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"] == request_id
    wait_until(lambda: any(request_id in line for line in lines))
    entry = logged(lines, request_id)
    assert (entry["status"], entry["path"], entry["client"]) == (status, reply.request.url.path, "127.0.0.1")
    assert entry["seconds"] > 0


def test_without_an_id_or_with_one_that_cannot_be_repeated_the_server_makes_one(live: LiveServer) -> None:
    many: list[dict[str, str]] = [{}, {}, *({"x-request-id": given} for given in ("", "two words", "x" * 129, 'a"'))]
    made = [live.http.get("/health", headers=headers).headers["x-request-id"] for headers in many]
    assert len(set(made)) == len(made)
    assert all(request_id.isalnum() for request_id in made)


def test_a_failure_nobody_foresaw_is_500_with_the_id_and_the_log_has_both(
    live: LiveServer, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    @live.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret of the inside")

    with caplog.at_level(logging.ERROR):
        # On a connection of its own: the server closes it.
        reply = httpx.get(f"{live.url}/broken", headers={"x-request-id": "broken-1"})
    assert error_of(reply, 500)["code"] == "internal_error"
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"] == "broken-1"
    assert logged(lines, "broken-1")["status"] == 500
    assert "broken-1" in caplog.text


def test_the_log_names_the_model_and_never_the_query(live: LiveServer, lines: list[str]) -> None:
    headers = {"x-request-id": "named"}
    body = {"model": "red", "messages": CHAT, "max_tokens": 2}
    assert live.http.post("/v1/chat/completions?key=hidden", json=body, headers=headers).status_code == 200
    wait_until(lambda: any('"named"' in line for line in lines))
    assert logged(lines, "named")["model"] == "red"
    assert not any("hidden" in line for line in lines)


def test_a_client_that_leaves_has_its_line_too(live: LiveServer, llm: AsyncLLM, lines: list[str]) -> None:
    before = len(lines)
    connection = open_request(live, "/v1/completions", {**LONG, "model": "red"})
    wait_until(lambda: llm.num_unfinished_requests == 1)
    connection.close()
    wait_until(lambda: len(lines) == before + 1)
    assert json.loads(lines[-1])["status"] == 499


def test_a_step_that_fails_is_500_for_its_request_alone_and_an_error_event_in_a_stream(
    live: LiveServer, llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = live.text(model="red", prompt="x", ignore_eos=True)
    with breaking(llm, RuntimeError("a secret of the inside")):
        whole = live.complete(model="red", prompt="x")
    assert error_of(whole, 500)["code"] == "step_failed"
    with breaking(llm, MemoryError()):
        stream = live.complete(model="red", prompt="x", stream=True, timeout=30)
    [event] = stream.text.strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "step_failed"
    assert "secret" not in whole.text + stream.text
    assert whole.headers["x-request-id"] in caplog.text
    assert live.text(model="red", prompt="x", ignore_eos=True) == wanted
