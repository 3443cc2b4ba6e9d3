"""Adapters that come and go while requests run (R050, R052, R053, R055)."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM, AsyncLLM, EngineConfig, SamplingParams
from graftlm.errors import (
    AdapterError,
    AdapterFilesNotFound,
    AdapterMemoryExceeded,
    AdapterNameTaken,
    ConfigurationError,
    ModelNotFound,
)
from tests import tiny
from tests.engine.rig import BLOCK_BYTES, greedy, one, prompt, token_ids

PARAMS = greedy(60, ignore_eos=True)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def open_engine(llama: Path, adapters: dict[str, Path], **options: Any) -> AsyncLLM:
    return AsyncLLM(llama, name="tiny", adapters=adapters, kv_cache_bytes=128 * BLOCK_BYTES, **options)


def room_for_one(llm: LLM) -> int:
    """Bytes that hold any one of the adapters, and the header of its file, but not all of them."""
    return max(adapter.num_bytes for adapter in llm.adapters.values()) + (8 << 10)


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


def test_r053_more_adapters_than_memory_holds_answer_together_and_alike(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    request = prompt(8)
    alone = {name: token_ids(one(llm, request, PARAMS, name)) for name in adapters}
    budget = room_for_one(llm)
    assert sum(adapter.num_bytes for adapter in llm.adapters.values()) > budget

    async def scenario() -> None:
        engine = open_engine(llama, adapters, adapter_memory_bytes=budget)
        assert list(engine.adapters) == list(adapters)
        assert sorted(engine.residency.values()) in (
            ["absent", "absent", "resident"],
            ["absent", "resident", "resident"],
        )
        names = [*adapters] * 4
        outputs = await asyncio.gather(*(engine.generate(request, PARAMS, adapter=name) for name in names))
        assert [token_ids(output) for output in outputs] == [alone[name] for name in names]
        await engine.shutdown()

    run(scenario())
    small = LLM(llama, adapters=adapters, kv_cache_bytes=128 * BLOCK_BYTES, adapter_memory_bytes=budget)
    outputs = small.generate([request] * 6, PARAMS, adapter=[*adapters] * 2)
    assert [token_ids(output) for output in outputs] == [alone[name] for name in [*adapters] * 2]
    small.shutdown()


def test_r053_a_running_requests_adapter_is_not_evicted(llm: LLM, llama: Path, adapters: dict[str, Path]) -> None:
    request = prompt(8)
    alone = {name: token_ids(one(llm, request, PARAMS, name)) for name in adapters}

    async def scenario() -> None:
        engine = open_engine(llama, adapters, adapter_memory_bytes=room_for_one(llm))
        running = await engine.add_request(request, PARAMS, adapter="blue")
        answer = list((await anext(running)).outputs[0].token_ids)
        waiting = await engine.add_request(request, PARAMS, adapter="green")
        assert engine.residency["green"] == "absent"
        answer += token_ids(await running.collect())
        assert tuple(answer) == alone["blue"]
        assert token_ids(await waiting.collect()) == alone["green"]
        assert engine.residency["blue"] == "absent"
        await engine.shutdown()

    run(scenario())


def test_r055_one_adapter_at_a_time_in_memory_and_any_number_registered(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    request, params = prompt(8), greedy(3, ignore_eos=True)
    alone = {name: token_ids(one(llm, request, params, name)) for name in adapters}

    async def scenario() -> None:
        engine = open_engine(llama, {}, adapter_memory_bytes=room_for_one(llm))
        for index in range(4):
            for name, folder in adapters.items():
                await engine.load_adapter(f"{name}-{index}", folder)
        assert len(engine.adapters) == 12
        for index in range(4):
            for name in adapters:
                output = await engine.generate(request, params, adapter=f"{name}-{index}")
                assert token_ids(output) == alone[name]
                assert output.adapter == f"{name}-{index}"
        await engine.shutdown()

    run(scenario())


def test_r052_a_replaced_name_switches_new_requests_and_accepted_ones_finish_on_the_old_weights(
    llm: LLM, llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    request = prompt(12)
    old, new = (token_ids(one(llm, request, PARAMS, name)) for name in ("red", "green"))

    async def scenario() -> None:
        engine = open_engine(llama, {"mine": adapters["red"]}, max_num_seqs=1)
        adapter = weakref.ref(engine.adapters["mine"])
        running = await engine.add_request(request, PARAMS, adapter="mine")
        begun = (await anext(running)).outputs[0].token_ids
        accepted = await engine.add_request(request, PARAMS, adapter="mine")
        with pytest.raises(AdapterNameTaken):
            await engine.load_adapter("mine", adapters["green"])
        with pytest.raises(AdapterError):
            await engine.load_adapter("mine", tmp_path, replace=True)
        await engine.load_adapter("mine", adapters["green"], replace=True)
        after = await engine.add_request(request, PARAMS, adapter="mine")
        assert begun + token_ids(await running.collect()) == old
        assert token_ids(await accepted.collect()) == old
        assert token_ids(await after.collect()) == new
        del running, accepted
        gc.collect()
        assert adapter() is None
        await engine.shutdown()

    run(scenario())


def test_r052_a_forced_unload_ends_the_requests_of_that_adapter_only(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    long = greedy(400, ignore_eos=True)

    async def scenario() -> None:
        engine = open_engine(llama, {name: adapters[name] for name in ("red", "green")}, max_num_seqs=3)
        free = engine.num_free_blocks
        adapter = weakref.ref(engine.adapters["red"])
        other = await engine.add_request(prompt(9), greedy(40, ignore_eos=True), adapter="green")
        # Running, part of a sum, and waiting.
        doomed = [
            await engine.add_request(prompt(5), long, adapter=name) for name in ("red", {"red": 0.5, "green": 1}, "red")
        ]
        await anext(doomed[0])
        await engine.unload_adapter("red", force=True)
        for stream in doomed:
            output = await stream.collect()
            assert output.outputs[0].finish_reason == "abort"
            assert len(output.outputs[0].token_ids) < 400
        assert token_ids(await other.collect()) == token_ids(one(llm, prompt(9), greedy(40, ignore_eos=True), "green"))
        with pytest.raises(ModelNotFound):
            await engine.unload_adapter("red", force=True)
        del doomed, stream, output
        gc.collect()
        assert adapter() is None
        assert engine.num_free_blocks == free
        await engine.shutdown()

    run(scenario())


def test_a_weighted_sum_counts_in_memory_and_outlives_its_parts_names(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    request, weights = prompt(8), {"red": 0.7, "green": 0.3}
    wanted = token_ids(llm.generate([request], PARAMS, adapter=weights)[0])
    red, green = (llm.adapters[name].num_bytes for name in ("red", "green"))

    async def scenario() -> None:
        two = {name: adapters[name] for name in weights}
        engine = open_engine(llama, two, adapter_memory_bytes=red + green)
        stream = await engine.add_request(request, PARAMS, adapter=weights)
        await anext(stream)
        # The sum is as large as both: there is room for nothing else.
        assert engine.residency == {"red": "absent", "green": "absent"}
        for name in weights:
            await engine.unload_adapter(name)
        rest = await stream.collect()
        assert token_ids(rest) == wanted[1:]
        for name, folder in two.items():
            await engine.load_adapter(name, folder)
        assert engine.residency == {"red": "resident", "green": "resident"}
        await engine.shutdown()
        engine = open_engine(llama, two, adapter_memory_bytes=(8 << 10) + max(red, green))
        with pytest.raises(AdapterMemoryExceeded):
            await engine.generate(request, PARAMS, adapter=weights)
        await engine.shutdown()

    run(scenario())


def test_a_load_that_fails_fails_those_who_wait_for_it_and_nobody_else(
    llm: LLM, llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    request = prompt(8)
    going = Path(shutil.copytree(adapters["green"], tmp_path / "going"))

    async def scenario() -> None:
        engine = open_engine(
            llama, {"blue": adapters["blue"], "going": going}, adapter_memory_bytes=room_for_one(llm), max_num_seqs=2
        )
        assert engine.residency == {"blue": "resident", "going": "absent"}
        shutil.rmtree(going)
        fine = [await engine.add_request(request, PARAMS, adapter=name) for name in ("blue", None)]
        failing = [await engine.add_request(request, greedy(4, n=2), adapter="going") for _ in range(2)]
        for stream in failing:
            with pytest.raises(AdapterFilesNotFound, match="adapter going: ") as refusal:
                await stream.collect()
            assert str(tmp_path) not in str(refusal.value)
        for name, stream in zip(("blue", None), fine, strict=True):
            assert token_ids(await stream.collect()) == token_ids(one(llm, request, PARAMS, name))
        assert engine.num_unfinished_requests == 0
        shutil.copytree(adapters["green"], going)
        again = await engine.generate(request, PARAMS, adapter="going")
        assert token_ids(again) == token_ids(one(llm, request, PARAMS, "green"))
        await engine.shutdown()

    run(scenario())


def test_a_client_that_leaves_while_its_adapter_is_loaded_leaves_nothing(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    async def scenario() -> None:
        engine = open_engine(llama, adapters, adapter_memory_bytes=room_for_one(llm))
        free = engine.num_free_blocks
        for _ in range(5):
            for name in adapters:
                stream = await engine.add_request(prompt(4), PARAMS, adapter=name)
                stream.abort()
                assert [delta async for delta in stream][-1].finished
        for name in adapters:
            await engine.unload_adapter(name, force=True)
        await engine.load_adapter("again", adapters["blue"])
        assert (await engine.generate(prompt(4), greedy(2), adapter="again")).finished
        assert (engine.num_unfinished_requests, engine.num_free_blocks) == (0, free)
        await engine.shutdown()

    run(scenario())


def test_fair_scheduling_is_an_option_and_unknown_policies_are_refused(llama: Path, adapters: dict[str, Path]) -> None:
    fair = LLM(
        llama, adapters=adapters, kv_cache_bytes=1 << 20, max_num_seqs=2, scheduling="fair", fair_shares={"red": 2}
    )
    outputs = fair.generate([prompt(4)] * 6, greedy(3, ignore_eos=True), adapter=["red", "green", None] * 2)
    assert all(output.finished for output in outputs)
    for wrong in ({"scheduling": "luck"}, {"fair_shares": {"a": 1}}, {"scheduling": "fair", "fair_shares": {"a": 0}}):
        with pytest.raises(ConfigurationError):
            EngineConfig(model=llama, **wrong)


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
