"""Long prompts: those that are refused hold up nobody, and those whose client leaves half-way leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from graftlm import AsyncLLM, SamplingParams
from graftlm.server import create_app
from tests.server.conftest import CONTEXT, Files
from tests.server.live_server import LiveServer, serving
from tests.server.test_disconnect import open_request, wait_until

HUGE: dict[str, tuple[str, dict[str, Any]]] = {
    "a million characters": ("/v1/completions", {"prompt": "x" * 10**6}),
    "a hundred thousand ids": ("/v1/completions", {"prompt": [1] * 10**5}),
    "five thousand messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 5000}),
}


@pytest.mark.parametrize("kind", HUGE)
def test_r086_a_running_stream_does_not_pause_while_a_huge_prompt_is_refused(files: Files, kind: str) -> None:
    path, body = HUGE[kind]
    content = json.dumps({"model": "tiny", **body}).encode()

    async def scenario() -> None:
        llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=8 << 20)
        params = SamplingParams(max_tokens=8000, ignore_eos=True)
        stream = await llm.add_request({"prompt_token_ids": [1]}, params)
        await anext(stream)
        arrived = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                arrived.set()

        async def next_token() -> None:
            arrived.clear()
            await arrived.wait()

        # The loop's own processor time between two of its turns: nothing is written to any stream of this server
        # meanwhile. It depends little on what else the machine does; the best of three requests, less.
        pauses: list[float] = []
        longest: list[float] = []

        async def watch() -> None:
            while True:
                before = time.thread_time()
                await asyncio.sleep(0.002)
                pauses.append(time.thread_time() - before)

        tasks = [asyncio.create_task(work) for work in (read(), watch())]
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            for _ in range(3):
                await next_token()
                reply = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert reply.json()["error"]["code"] == "context_length_exceeded"
                await next_token()
                longest.append(max(pauses))
                pauses.clear()
        assert min(longest) < 0.2
        stream.abort()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    """Eight tokens in a step: a long prompt takes hundreds of them."""
    return AsyncLLM(
        files.base, name="tiny", adapters={"red": files.red}, max_num_batched_tokens=8, kv_cache_bytes=8 << 20
    )


@pytest.fixture(scope="module")
def live(llm: AsyncLLM) -> Iterator[LiveServer]:
    with serving(llm) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_the_middle_of_its_prompt_leaves_nothing_behind(
    live: LiveServer, llm: AsyncLLM, stream: bool
) -> None:
    free = llm.num_free_blocks
    body = {"model": "red", "prompt": [1, 2, 3, 4] * (CONTEXT // 8), "max_tokens": 5, "stream": stream}
    connection = open_request(live, "/v1/completions", body)
    # A few blocks of it are there, and no token of an answer.
    wait_until(lambda: llm.num_free_blocks < free)
    connection.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)
    assert llm.num_free_blocks == free
    assert llm.read_metrics()[0].models["red"].generated_tokens == 0
