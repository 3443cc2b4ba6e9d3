"""Adapters that come and go while requests run (R050, R052, R053)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM, AsyncLLM, SamplingParams
from graftlm.errors import AdapterError, AdapterMemoryExceeded, AdapterNameTaken, ModelNotFound
from tests import tiny
from tests.engine.rig import BLOCK_BYTES, greedy, one, prompt, token_ids

PARAMS = greedy(60, ignore_eos=True)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def open_engine(llama: Path, adapters: dict[str, Path], **options: Any) -> AsyncLLM:
    return AsyncLLM(llama, name="tiny", adapters=adapters, kv_cache_bytes=128 * BLOCK_BYTES, **options)


def test_r050_loading_and_unloading_during_traffic_changes_nobodys_tokens(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    names = [None, "red", "green", None, "red", "green", "red", None]
    requests = [prompt(10 + index) for index in range(8)]
    params = greedy(200, ignore_eos=True)
    quiet = [token_ids(output) for output in llm.generate(requests, params, adapter=names)]

    async def scenario() -> None:
        engine = open_engine(llama, {name: adapters[name] for name in ("red", "green")})
        streams = asyncio.gather(
            *(
                engine.generate(*each, adapter=name)
                for each, name in zip([(r, params) for r in requests], names, strict=True)
            )
        )
        cycles = 0
        while not streams.done() and cycles < 30:
            await engine.load_adapter("blue", adapters["blue"])
            assert (await engine.generate(prompt(3), greedy(2, ignore_eos=True), adapter="blue")).finished
            await engine.unload_adapter("blue")
            with pytest.raises(ModelNotFound):
                await engine.generate(prompt(3), greedy(1), adapter="blue")
            cycles += 1
        assert cycles >= 2
        assert [token_ids(output) for output in await streams] == quiet
        assert set(engine.adapters) == {"red", "green"}
        await engine.shutdown()

    run(scenario())


def test_r052_a_request_finishes_on_the_weights_it_began_with(llm: LLM, llama: Path, adapters: dict[str, Path]) -> None:
    request = prompt(12)
    old, new = (token_ids(one(llm, request, PARAMS, name)) for name in ("red", "green"))
    assert old != new

    async def scenario() -> None:
        engine = open_engine(llama, {"mine": adapters["red"]})
        adapter = weakref.ref(engine.adapters["mine"])
        stream = await engine.add_request(request, PARAMS, adapter="mine")
        first = await anext(stream)
        await engine.unload_adapter("mine")
        with pytest.raises(ModelNotFound):
            await engine.generate(request, PARAMS, adapter="mine")
        await engine.load_adapter("mine", adapters["green"])
        replacement, rest = await asyncio.gather(engine.generate(request, PARAMS, adapter="mine"), stream.collect())
        assert first.outputs[0].token_ids + token_ids(rest) == old
        assert token_ids(replacement) == new
        del stream
        gc.collect()
        assert adapter() is None
        await engine.shutdown()

    run(scenario())


def test_r053_adapters_in_use_are_not_evicted_and_over_the_budget_nothing_is_loaded(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    sizes = {name: adapter.num_bytes for name, adapter in llm.adapters.items()}
    request = prompt(8)
    alone = {name: token_ids(one(llm, request, PARAMS, name)) for name in adapters}
    # Room for two and the headers of their files.
    budget = sizes["red"] + sizes["green"] + (8 << 10)
    assert sizes["blue"] > 8 << 10

    async def scenario() -> None:
        engine = open_engine(llama, {}, adapter_memory_bytes=budget)
        await engine.load_adapter("red", adapters["red"])
        await engine.load_adapter("green", adapters["green"])
        streams = {name: await engine.add_request(request, PARAMS, adapter=name) for name in ("red", "green")}
        with pytest.raises(AdapterMemoryExceeded):
            await engine.load_adapter("blue", adapters["blue"])
        # Unloading frees the name at once, the memory with the last request.
        await engine.unload_adapter("red")
        with pytest.raises(AdapterMemoryExceeded):
            await engine.load_adapter("red-again", adapters["red"])
        for name, stream in streams.items():
            assert token_ids(await stream.collect()) == alone[name]
        await engine.load_adapter("red-again", adapters["red"])
        assert token_ids(await engine.generate(request, PARAMS, adapter="red-again")) == alone["red"]
        await engine.shutdown()

    run(scenario())


def test_two_names_for_the_same_files_are_held_apart(llm: LLM, llama: Path, adapters: dict[str, Path]) -> None:
    request = prompt(8)
    wanted = token_ids(one(llm, request, PARAMS, "red"))

    async def scenario() -> None:
        engine = open_engine(llama, {"one": adapters["red"], "two": adapters["red"]})
        first = await engine.add_request(request, PARAMS, adapter="one")
        second = await engine.add_request(request, PARAMS, adapter="two")
        await anext(second)
        first.abort()
        await engine.unload_adapter("one")
        *_, last = [delta async for delta in second]
        assert last.finished
        assert last.adapter == "two"
        assert token_ids(await engine.generate(request, PARAMS, adapter="two")) == wanted
        await engine.shutdown()

    run(scenario())


def test_of_many_loads_under_one_name_exactly_one_succeeds(llama: Path, adapters: dict[str, Path]) -> None:
    async def scenario() -> None:
        engine = open_engine(llama, {})
        results = await asyncio.gather(
            *(engine.load_adapter("a", adapters[name]) for name in (*adapters, *adapters)), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        assert len(failures) == 5
        assert {type(failure) for failure in failures} == {AdapterNameTaken}
        (loaded,) = [result for result in results if not isinstance(result, BaseException)]
        assert engine.adapters["a"] is loaded
        await engine.shutdown()

    run(scenario())


def test_a_failed_load_changes_nothing(llm: LLM, llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    request = prompt(8)

    async def scenario() -> None:
        engine = open_engine(llama, {"red": adapters["red"]})
        running = asyncio.create_task(engine.generate(request, PARAMS, adapter="red"))
        for source in (tmp_path / "missing", tmp_path):
            with pytest.raises(AdapterError):
                await engine.load_adapter("blue", source)
        assert set(engine.adapters) == {"red"}
        assert token_ids(await running) == token_ids(one(llm, request, PARAMS, "red"))
        await engine.shutdown()

    run(scenario())


def test_holds_of_many_concurrent_requests_are_all_given_back(llama: Path, adapters: dict[str, Path]) -> None:
    async def scenario() -> None:
        engine = open_engine(llama, {"red": adapters["red"]})
        adapter = weakref.ref(engine.adapters["red"])
        for _ in range(3):
            outputs = await asyncio.gather(
                *(engine.generate(prompt(2, seed), greedy(1, ignore_eos=True), adapter="red") for seed in range(100))
            )
            assert all(output.finished for output in outputs)
        await engine.unload_adapter("red")
        del outputs
        gc.collect()
        assert adapter() is None
        await engine.shutdown()

    run(scenario())


def test_a_request_whose_adapter_overflows_is_given_up_and_its_neighbours_are_not(tmp_path: Path, llama: Path) -> None:
    loud = tiny.make_adapter(llama, tmp_path / "overflow", scale=1e30, target_modules=tiny.ALL_PROJECTIONS)
    llm = LLM(llama, adapters={"overflow": loud})
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = llm.generate("hello", params)[0].outputs[0].token_ids
    overflowed, base = llm.generate(["hello", "hello"], params, adapter=["overflow", None])
    assert overflowed.outputs[0].finish_reason == "abort"
    assert overflowed.outputs[0].stop_reason == "the model's output is not a number"
    assert base.outputs[0].token_ids == alone
