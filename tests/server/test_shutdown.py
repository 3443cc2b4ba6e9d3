"""What clients see when the server stops while they wait."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from graftlm import AsyncLLM
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, wait_until


def small_engine(files: Files) -> AsyncLLM:
    return AsyncLLM(files.base, name="tiny", kv_cache_bytes=8 << 20)


def test_a_request_that_can_finish_in_time_does(files: Files) -> None:
    llm = small_engine(files)
    with ThreadPoolExecutor(1) as pool, serving(llm, drain_seconds=30) as live:
        running = pool.submit(live.complete, model="tiny", prompt="x", max_tokens=200, ignore_eos=True)
        wait_until(lambda: llm.num_unfinished_requests == 1)
        live.server.should_exit = True
        assert running.result().json()["usage"]["completion_tokens"] == 200


@pytest.fixture
def stopped(files: Files) -> tuple[httpx.Response, str]:
    """The reply to a whole request, and the text of a stream, that were cut off."""
    llm = small_engine(files)
    with ThreadPoolExecutor(2) as pool, serving(llm) as live:
        whole = pool.submit(live.complete, **LONG, model="tiny")
        stream = pool.submit(live.complete, **LONG, model="tiny", stream=True)
        wait_until(lambda: llm.num_unfinished_requests == 2)
        live.server.should_exit = True
        return whole.result(), stream.result().text


def test_r078_a_request_cut_off_is_503_and_a_stream_ends_with_an_error_event(
    stopped: tuple[httpx.Response, str],
) -> None:
    whole, stream = stopped
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_closed"
    last = stream.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_without_its_engine_the_server_says_503(files: Files) -> None:
    llm = small_engine(files)
    asyncio.run(llm.shutdown())
    with serving(llm) as live:
        for reply in (
            live.http.get("/health"),
            live.http.get("/v1/models"),
            live.complete(model="tiny", prompt="x"),
            live.complete(model="tiny", prompt="x", stream=True),
            live.chat(model="tiny", messages=[{"role": "user", "content": "x"}]),
        ):
            assert error_of(reply, 503)["code"] == "engine_closed"


def test_r078_the_openai_client_raises_on_the_error_event(files: Files) -> None:
    llm = small_engine(files)

    def read(live: LiveServer) -> None:
        for _ in live.openai.completions.create(
            model="tiny", prompt="x", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        ):
            pass

    with ThreadPoolExecutor(1) as pool, serving(llm) as live:
        reading = pool.submit(read, live)
        wait_until(lambda: llm.num_unfinished_requests == 1)
        live.server.should_exit = True
        with pytest.raises(openai.APIError):
            reading.result()
