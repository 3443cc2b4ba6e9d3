"""Generated and malformed requests in small numbers; `benchmarks/http_robustness.py` sends thousands."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from graftlm import AsyncLLM
from tests.server.conftest import Files
from tests.server.generated_requests import statuses_of
from tests.server.live_server import LiveServer, serving
from tests.server.malformed_requests import send_malformed
from tests.server.test_disconnect import wait_until


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    """A short context: what asks for as much as there is ends soon."""
    return AsyncLLM(files.base, name="tiny", adapters={"red": files.red}, max_model_len=48, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def short(llm: AsyncLLM) -> Iterator[LiveServer]:
    with serving(llm) as live:
        yield live


def test_what_the_description_allows_is_never_the_servers_fault(short: LiveServer) -> None:
    statuses, failures = statuses_of(
        short.url, ["tiny", "red"], cases=60, seed=1, paths=["/v1/completions", "/detokenize"]
    )
    assert failures == []
    assert statuses[200] > 5
    assert statuses[400] > 20


def test_what_is_hardly_http_is_refused_and_leaves_nothing_behind(short: LiveServer, llm: AsyncLLM) -> None:
    before = short.text(model="red", prompt="hello")
    num_free, process = llm.num_free_blocks, psutil.Process()
    num_files = process.num_fds()
    statuses = send_malformed(short.url, cases=300, seed=2)
    assert max(statuses) < 500, statuses
    assert statuses[200] > 5
    assert statuses[400] > 50
    wait_until(lambda: llm.num_unfinished_requests == 0)
    wait_until(lambda: process.num_fds() <= num_files)
    assert short.text(model="red", prompt="hello") == before
    wait_until(lambda: llm.num_free_blocks == num_free)
