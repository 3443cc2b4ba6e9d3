"""The asynchronous front end: streams, aborts, failures and shutdown (R017, R052, R064, R081, R082, R093)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM, AsyncLLM, RequestOutput, RequestStream, SamplingParams
from graftlm.errors import EngineClosed, InvalidRequest, ModelNotFound
from tests.engine.rig import BLOCK_BYTES, chain_of, greedy, ids_of, make_chain, one, prompt, token_ids

Open = Callable[..., AsyncLLM]
DEADLINE = 60.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or fail: nothing here may hang."""
    asyncio.run(asyncio.wait_for(scenario, DEADLINE))


@pytest.fixture
def open_engine(llama: Path, adapters: dict[str, Path]) -> Open:
    """A fresh engine; the scenario shuts it down."""

    def open_(**options: Any) -> AsyncLLM:
        return AsyncLLM(llama, **{"name": "tiny", "adapters": adapters, "kv_cache_bytes": 64 * BLOCK_BYTES, **options})

    return open_


async def settle(engine: AsyncLLM) -> None:
    """Return once the engine has obeyed everything asked of it before: commands are taken in order."""
    await engine.generate(prompt(1), greedy(1, ignore_eos=True))


def is_gone(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    return reference() is None


async def read(stream: RequestStream, count: int) -> list[RequestOutput]:
    return [await anext(stream) for _ in range(count)]


@pytest.mark.parametrize("adapter", [None, "red", "blue"])
def test_r017_a_streams_deltas_join_to_the_whole_answer(llm: LLM, open_engine: Open, adapter: str | None) -> None:
    async def scenario() -> None:
        engine = open_engine()
        for seed in range(4):
            params = SamplingParams(
                max_tokens=40, temperature=float(seed > 0), seed=seed, logprobs=2, prompt_logprobs=1
            )
            whole = one(llm, prompt(20, seed), params, adapter)
            deltas = [delta async for delta in engine.stream(prompt(20, seed), params, adapter=adapter)]
            assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
            assert tuple(i for delta in deltas for i in delta.outputs[0].token_ids) == whole.outputs[0].token_ids
            entries = tuple(entry for delta in deltas for entry in delta.outputs[0].logprobs or ())
            assert [entry.token_id for entry in entries] == list(whole.outputs[0].token_ids)
            assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert [delta.outputs[0].finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].outputs[0].finish_reason == whole.outputs[0].finish_reason
            assert deltas[-1].num_output_tokens == len(whole.outputs[0].token_ids)
            # The prompt's part comes once, with the first delta.
            assert [len(delta.prompt_logprobs or ()) for delta in deltas] == [20] + [0] * (len(deltas) - 1)
            assert deltas[0].prompt_logprobs == whole.prompt_logprobs
            assert {delta.adapter for delta in deltas} == {adapter}
        await engine.shutdown()

    run(scenario())


def test_r082_each_of_n_answers_has_its_own_deltas_and_one_finish(llm: LLM, open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        params = SamplingParams(max_tokens=30, seed=11, n=3, stop_token_ids=range(0, 256, 9))
        whole = one(llm, prompt(7), params)
        assert len({len(answer.token_ids) for answer in whole.outputs}) > 1
        texts: dict[int, str] = defaultdict(str)
        ids: dict[int, list[int]] = defaultdict(list)
        finishes: dict[int, list[str]] = defaultdict(list)
        finished = []
        async for delta in engine.stream(prompt(7), params):
            finished.append(delta.finished)
            for answer in delta.outputs:
                assert answer.index not in finishes
                texts[answer.index] += answer.text
                ids[answer.index].extend(answer.token_ids)
                if answer.finish_reason is not None:
                    finishes[answer.index].append(answer.finish_reason)
        for answer in whole.outputs:
            assert texts[answer.index] == answer.text
            assert tuple(ids[answer.index]) == answer.token_ids
            assert finishes[answer.index] == [answer.finish_reason]
        assert finished == [False] * (len(finished) - 1) + [True]
        await engine.shutdown()

    run(scenario())


def test_r082_n_answers_that_end_in_the_same_step_all_arrive(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        output = await engine.generate(prompt(7), SamplingParams(max_tokens=5, seed=1, n=4, ignore_eos=True))
        assert [len(answer.token_ids) for answer in output.outputs] == [5] * 4
        assert (await engine.generate(prompt(7), greedy(0, n=3))).finished
        await engine.shutdown()

    run(scenario())


@pytest.mark.parametrize(("stop", "text"), [("STOP", "abc"), (["STOPS"], "abcSTOPdef"), (["Pd", "x"], "abcSTO")])
def test_r063_no_part_of_a_stop_string_is_streamed(tmp_path: Path, stop: Any, text: str) -> None:
    async def scenario() -> None:
        folder = make_chain(tmp_path, chain_of([*ids_of("xabcSTOPdef"), 257]))
        engine = AsyncLLM(folder, kv_cache_bytes=1 << 20, max_model_len=64)
        shown = ""
        async for delta in engine.stream({"prompt_token_ids": ids_of("x")}, greedy(20, stop=stop)):
            shown += delta.outputs[0].text
            assert text.startswith(shown)
        assert shown == text
        await engine.shutdown()

    run(scenario())


def test_r052_r081_an_abort_at_any_stage_frees_blocks_and_adapter(open_engine: Open, adapters: dict[str, Path]) -> None:
    """Queued, in the middle of the prompt, while decoding, on the last token, finished, twice, and never read."""

    async def scenario() -> None:
        engine = open_engine(max_num_seqs=3, max_num_batched_tokens=8)
        await settle(engine)
        free = engine.num_free_blocks
        adapter = weakref.ref(engine.adapters["red"])
        # Two long answers keep two of the three places, so later requests wait or crawl through their prompts.
        holders = [await engine.add_request(prompt(3), greedy(400, ignore_eos=True), adapter="red") for _ in range(2)]
        for holder in holders:
            await anext(holder)
        streams = []
        for index in range(20):
            length, tokens = (200, 5) if index % 2 else (2, 3)
            stream = await engine.add_request(prompt(length, index), greedy(tokens, ignore_eos=True), adapter="red")
            streams.append(stream)
            if index % 5 == 1:
                # In the middle of its prompt, or waiting: the other streams have moved on by a few steps.
                await read(holders[0], 3)
                stream.abort()
            elif index % 5 == 2:
                await read(stream, 1)
                stream.abort()
            elif index % 5 == 3:
                stream.abort()
                stream.abort()
            elif index % 5 == 4:
                await read(stream, tokens)
                stream.abort()
        for stream in (*streams, *holders):
            stream.abort()
        await settle(engine)
        assert engine.num_unfinished_requests == 0
        assert engine.num_free_blocks == free
        for stream in (*streams, *holders):
            last = [delta async for delta in stream][-1:]
            assert all(delta.finished for delta in last)
        await asyncio.wait_for(engine.unload_adapter("red"), 5)
        del streams, holders, stream, holder, last
        assert is_gone(adapter)
        await engine.load_adapter("red", adapters["red"])
        assert (await engine.generate(prompt(3), greedy(3), adapter="red")).adapter == "red"
        await engine.shutdown()

    run(scenario())


def test_r081_the_stream_of_an_aborted_request_ends_with_the_reason_abort(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        stream = await engine.add_request(prompt(5), greedy(300, ignore_eos=True, n=2))
        await read(stream, 3)
        stream.abort()
        *_, last = [delta async for delta in stream]
        assert last.finished
        assert {answer.index: answer.finish_reason for answer in last.outputs} == {0: "abort", 1: "abort"}
        await engine.shutdown()

    run(scenario())


def test_r081_leaving_an_iterator_or_cancelling_a_wait_stops_the_work(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        free = engine.num_free_blocks
        deltas = engine.stream(prompt(5), greedy(400, ignore_eos=True), adapter="red")
        async for delta in deltas:
            assert not delta.finished
            break
        await deltas.aclose()  # type: ignore[attr-defined]
        waiting = asyncio.create_task(engine.generate(prompt(5), greedy(400, ignore_eos=True), adapter="red"))
        while engine.num_unfinished_requests == 0:
            await settle(engine)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await settle(engine)
        assert engine.num_unfinished_requests == 0
        assert engine.num_free_blocks == free
        await engine.shutdown()

    run(scenario())


def test_a_client_that_leaves_while_its_prompt_is_checked_keeps_nothing(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        adapter = weakref.ref(engine.adapters["red"])
        ids = SlowIds()
        asking = asyncio.create_task(engine.generate({"prompt_token_ids": ids}, greedy(4), adapter="red"))
        await asyncio.to_thread(ids.asked.wait, DEADLINE)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ids.answer.set()
        await asyncio.to_thread(ids.answered.wait, DEADLINE)
        await settle(engine)
        await engine.unload_adapter("red")
        del asking
        assert is_gone(adapter)
        await engine.shutdown()

    run(scenario())


class SlowIds:
    """Token ids that arrive when a test allows it."""

    def __init__(self) -> None:
        self.asked, self.answer, self.answered = threading.Event(), threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.asked.set()
        assert self.answer.wait(DEADLINE)
        yield from (1, 2, 3)
        self.answered.set()


def test_requests_are_refused_before_they_are_queued(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        adapter = weakref.ref(engine.adapters["red"])
        with pytest.raises(InvalidRequest):
            await engine.add_request({"prompt_token_ids": [999]}, greedy(1), adapter="red")
        with pytest.raises(ModelNotFound):
            await engine.generate("a", greedy(1), adapter="nope")
        with pytest.raises(InvalidRequest):
            await anext(engine.stream("", greedy(1), adapter="red"))
        await engine.unload_adapter("red")
        assert is_gone(adapter)
        await engine.shutdown()

    run(scenario())


def test_r093_a_long_prompt_does_not_hold_up_a_running_stream(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_batched_tokens=32)
        running = await engine.add_request(prompt(4), greedy(400, ignore_eos=True))
        await anext(running)
        order: list[str] = []

        async def note(name: str, stream: RequestStream) -> None:
            async for delta in stream:
                order.extend([name] * len(delta.outputs))

        watching = asyncio.create_task(note("running", running))
        long = await engine.add_request(prompt(480), greedy(1))
        await note("long", long)
        # 480 tokens at 31 in each step: the running stream got a token in every one of those 16 steps.
        assert order.index("long") >= 15
        running.abort()
        await watching
        await engine.shutdown()

    run(scenario())


def test_shutdown_lets_running_requests_finish_within_its_time(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=1)
        streams = [await engine.add_request(prompt(4), greedy(50, ignore_eos=True)) for _ in range(3)]
        await anext(streams[0])
        await engine.shutdown(drain_seconds=DEADLINE)
        for stream in streams:
            *_, last = [delta async for delta in stream]
            assert last.outputs[0].finish_reason == "length"
            assert last.num_output_tokens == 50
        with pytest.raises(EngineClosed):
            await engine.generate("a", greedy(1))

    run(scenario())


def test_shutdown_also_drains_a_request_that_was_accepted_a_moment_ago(open_engine: Open) -> None:
    async def scenario() -> None:
        for _ in range(6):
            engine = open_engine(adapters={})
            stream = await engine.add_request(prompt(4), greedy(20, ignore_eos=True))
            await engine.shutdown(drain_seconds=DEADLINE)
            assert len(token_ids(await stream.collect())) == 20

    run(scenario())


def test_shutdown_without_time_ends_running_and_waiting_requests_with_an_error(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine(max_num_seqs=1)
        streams = [await engine.add_request(prompt(4), greedy(400, ignore_eos=True), adapter="red") for _ in range(3)]
        await anext(streams[0])
        await engine.shutdown()
        for stream in streams:
            with pytest.raises(EngineClosed):
                await stream.collect()
        assert not engine.is_running
        for late in (engine.tokenize("a"), engine.load_adapter("x", "y"), engine.generate("a", greedy(1))):
            with pytest.raises(EngineClosed):
                await late
        await engine.shutdown()

    run(scenario())


def test_a_request_whose_prompt_is_checked_during_shutdown_does_not_hang(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        ids = SlowIds()
        asking = asyncio.create_task(engine.generate({"prompt_token_ids": ids}, greedy(4), adapter="red"))
        await asyncio.to_thread(ids.asked.wait, DEADLINE)
        await engine.shutdown()
        ids.answer.set()
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asking, 5)

    run(scenario())


def test_chats_are_tokenised_as_transformers_does(open_engine: Open) -> None:
    async def scenario() -> None:
        engine = open_engine()
        ids = await engine.apply_chat_template([{"role": "user", "content": "hi"}])
        assert ids.count(256) == 2
        assert ids[0] == 256
        assert await engine.tokenize("hi") == tuple(await engine.tokenize("hi"))
        (await engine.generate({"prompt_token_ids": ids}, greedy(2)))
        await engine.shutdown()

    run(scenario())
