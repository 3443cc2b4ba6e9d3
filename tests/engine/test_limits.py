"""What an engine refuses or gives up: requests beyond its queue, and those whose time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from graftlm import AsyncLLM
from graftlm.engine.request_stream import MAX_UNREAD
from graftlm.errors import DeadlineExceeded, EngineOverloaded, InvalidRequest
from tests.engine.rig import BLOCK_BYTES, greedy, prompt, token_ids

Open = Callable[..., AsyncLLM]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.fixture
def open_engine(llama: Path) -> Open:
    def open_(**options: Any) -> AsyncLLM:
        return AsyncLLM(llama, **{"kv_cache_bytes": 64 * BLOCK_BYTES, **options})

    return open_


LONG = greedy(480, ignore_eos=True)


def test_requests_beyond_the_queue_are_refused_and_those_in_it_answered(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=2, max_queued_requests=3)
        accepted = [await engine.add_request(prompt(4, seed), greedy(40, ignore_eos=True)) for seed in range(5)]
        with pytest.raises(EngineOverloaded, match="5 unfinished answers") as refused:
            await engine.add_request(prompt(4), greedy(1))
        assert refused.value.retry_after_seconds >= 1
        for stream in accepted:
            assert len(token_ids(await stream.collect())) == 40
        assert token_ids(await engine.generate(prompt(4), greedy(1, ignore_eos=True)))
        await engine.shutdown()

    run(scenario())


def test_requests_that_arrive_at_once_do_not_slip_past_the_limit_together(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=1, max_queued_requests=4)
        results = await asyncio.gather(
            *(engine.add_request(prompt(4), LONG) for _ in range(20)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, EngineOverloaded)]
        assert len(refused) == 15
        assert engine.num_unfinished_requests == 5
        await engine.shutdown()

    run(scenario())


def test_each_of_n_answers_takes_a_place_but_an_idle_engine_takes_any_request(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=1, max_queued_requests=1)
        stream = await engine.add_request(prompt(4), greedy(30, ignore_eos=True, n=6))
        with pytest.raises(EngineOverloaded):
            await engine.add_request(prompt(4), greedy(1))
        assert len((await stream.collect()).outputs) == 6
        await engine.shutdown()

    run(scenario())


@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_request_whose_time_is_over_is_stopped_wherever_it_is(open_engine: Open, place: str) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=1, kv_cache_bytes=64 * BLOCK_BYTES)
        free = engine.num_free_blocks
        ahead = await engine.add_request(prompt(4), LONG) if place == "waiting" else None
        late = await engine.add_request(prompt(4), LONG, timeout=0.1)
        with pytest.raises(DeadlineExceeded, match=r"0\.1 seconds"):
            await late.collect()
        if ahead is not None:
            assert len(token_ids(await ahead.collect())) == 480
        await engine.generate(prompt(1), greedy(1, ignore_eos=True))
        assert engine.num_unfinished_requests == 0
        assert engine.num_free_blocks == free
        await engine.shutdown()

    run(scenario())


def test_what_came_in_time_is_readable_before_the_error(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        stream = await engine.add_request(prompt(4), LONG, timeout=0.1)
        await stream.ended()
        while not isinstance(item := (await asyncio.gather(anext(stream), return_exceptions=True))[0], Exception):
            assert not item.finished
            assert item.outputs[0].token_ids
        assert isinstance(item, DeadlineExceeded)
        assert stream.num_answers == 1
        await engine.shutdown()

    run(scenario())


def test_a_request_that_is_answered_in_time_hears_nothing_of_its_timeout(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        assert len(token_ids(await engine.generate(prompt(4), greedy(8, ignore_eos=True), timeout=30))) == 8
        for timeout in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest, match="timeout"):
                await engine.generate(prompt(4), greedy(8), timeout=timeout)
        await engine.shutdown()

    run(scenario())


def test_a_reader_that_falls_behind_gets_joined_deltas_with_nothing_missing(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        params = greedy(480, ignore_eos=True, n=2, logprobs=1, prompt_logprobs=1)
        whole = await engine.generate(prompt(9), params)
        stream = await engine.add_request(prompt(9), params)
        first = await anext(stream)
        await stream.ended()
        deltas = [first, *[delta async for delta in stream]]
        # Two answers of 480 tokens each; unread, they never were more than so many objects.
        assert len(deltas) <= MAX_UNREAD + 1
        assert [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs] == [whole.prompt_logprobs]
        for index, answer in enumerate(whole.outputs):
            parts = [part for delta in deltas for part in delta.outputs if part.index == index]
            assert "".join(part.text for part in parts) == answer.text
            assert tuple(token_id for part in parts for token_id in part.token_ids) == answer.token_ids
            assert tuple(entry for part in parts for entry in part.logprobs or ()) == answer.logprobs
            assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        await engine.shutdown()

    run(scenario())


def test_r094_an_aborted_request_ends_at_once_wherever_it_is(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=2, max_num_batched_tokens=4)
        free = engine.num_free_blocks
        decoding = await engine.add_request(prompt(2), LONG)
        await anext(decoding)
        # At three tokens in a step it takes more than a hundred of them.
        prefilling = await engine.add_request(prompt(400), greedy(1))
        queued = await engine.add_request(prompt(4), LONG)
        await anext(decoding)
        for stream in (queued, prefilling, decoding):
            stream.abort()
            *_, last = [delta async for delta in stream]
            assert last.finished
            assert [answer.finish_reason for answer in last.outputs] == ["abort"]
        for ended in (queued, prefilling, decoding):
            ended.abort()
        assert token_ids(await engine.generate(prompt(4), greedy(4, ignore_eos=True)))
        assert engine.num_unfinished_requests == 0
        assert engine.num_free_blocks == free
        await engine.shutdown()

    run(scenario())
