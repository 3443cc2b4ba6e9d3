"""A step in which something breaks: its requests fail with an error, and nothing else does."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from graftlm import LLM, AsyncLLM
from graftlm.errors import EngineClosed, StepFailed
from tests.engine.rig import BLOCK_BYTES, core, greedy, held, one, prompt, token_ids
from tests.tiny import make_adapter, make_llama

BREAKDOWNS: dict[str, Callable[[], BaseException]] = {
    "a fault": lambda: ValueError("injected"),
    "no memory (torch)": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "no memory (allocator)": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "no memory (Python)": MemoryError,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("failing") / "base")


@contextmanager
def breaking(llm: LLM | AsyncLLM, error: BaseException) -> Iterator[list[int]]:
    """Until it has broken once, the output head raises: the layers have written their keys and values by then. The list
    gets the number of rows of the batch that broke."""
    head = core(llm)._executor._runner._span.output.head
    weight = head.weight
    rows: list[int] = []

    class Broken:
        def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            head.weight = weight
            rows.append(len(x))
            raise error

    head.weight = Broken()
    try:
        yield rows
    finally:
        head.weight = weight


@pytest.mark.parametrize("breakdown", BREAKDOWNS)
def test_only_the_requests_of_the_step_fail(base: Path, breakdown: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = AsyncLLM(base, max_num_seqs=2, kv_cache_bytes=64 * BLOCK_BYTES)
        free = engine.num_free_blocks
        wanted = token_ids(await engine.generate(prompt(9), greedy(8)))
        running = [await engine.add_request(prompt(4, seed), greedy(300, ignore_eos=True)) for seed in range(2)]
        for stream in running:
            await anext(stream)
        waiting = [await engine.add_request(prompt(9), greedy(8)) for _ in range(3)]
        with breaking(engine, BREAKDOWNS[breakdown]()) as rows:
            for stream in running:
                with pytest.raises(StepFailed, match="failed while computing"):
                    await stream.collect()
            assert rows == [2]
            for stream in waiting:
                assert token_ids(await stream.collect()) == wanted
        assert engine.num_unfinished_requests == 0
        assert engine.num_free_blocks == free
        await engine.shutdown()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "a step failed" in caplog.text


def test_a_request_that_is_not_in_the_step_is_not_touched(base: Path) -> None:
    async def scenario() -> None:
        # Eight tokens in a step: the first of a prompt of 40 are all of it.
        engine = AsyncLLM(base, max_num_batched_tokens=8, max_num_seqs=8, kv_cache_bytes=64 * BLOCK_BYTES)
        wanted = token_ids(await engine.generate(prompt(8), greedy(8)))
        with breaking(engine, RuntimeError("injected")):
            with held(engine):
                first = await engine.add_request(prompt(40), greedy(4))
                second = await engine.add_request(prompt(8), greedy(8))
            with pytest.raises(StepFailed):
                await first.collect()
        assert token_ids(await second.collect()) == wanted
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_a_failed_step_wrote_is_never_read_from_the_prefix_cache(base: Path) -> None:
    llm = LLM(base, kv_cache_bytes=16 * BLOCK_BYTES, max_num_batched_tokens=64)
    cold = LLM(base, kv_cache_bytes=16 * BLOCK_BYTES, prefix_cache=False)
    wanted = token_ids(one(cold, prompt(100), greedy(8)))
    with breaking(llm, RuntimeError("injected")), pytest.raises(StepFailed) as failure:
        one(llm, prompt(100), greedy(8))
    assert isinstance(failure.value.__cause__, RuntimeError)
    again = one(llm, prompt(100), greedy(8))
    assert token_ids(again) == wanted
    assert again.num_cached_tokens == 0
    assert one(llm, prompt(100), greedy(8)).num_cached_tokens == 96


def test_a_failed_step_does_not_keep_its_adapter(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = AsyncLLM(base, adapters={"red": make_adapter(base, tmp_path / "red", seed=1)}, kv_cache_bytes=1 << 20)
        adapter = weakref.ref(engine.adapters["red"])
        with breaking(engine, RuntimeError("injected")):
            stream = await engine.add_request(prompt(9), greedy(8), adapter="red")
            with pytest.raises(StepFailed):
                await stream.collect()
        await engine.unload_adapter("red")
        caplog.clear()  # the log record's traceback holds frames that hold the adapter
        gc.collect()
        assert adapter() is None
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_whose_own_books_fail_leaves_nobody_waiting(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = AsyncLLM(base, kv_cache_bytes=64 * BLOCK_BYTES)
        running = await engine.add_request(prompt(4), greedy(200, ignore_eos=True))
        await anext(running)

        def broken(job: object) -> None:
            raise RuntimeError("injected")

        core(engine).add = broken
        late = await engine.add_request(prompt(4), greedy(8))
        for stream in (running, late):
            with pytest.raises(EngineClosed, match="has failed"):
                await stream.collect()
        assert not engine.is_running
        with pytest.raises(EngineClosed):
            await engine.generate(prompt(4), greedy(8))
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "thread has failed" in caplog.text
