"""The life of adapters in a running engine: names, versions, holds, memory, many loads."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from graftlm import LLM
from graftlm.adapters import Adapter, AdapterRegistry
from graftlm.errors import (
    AdapterChanged,
    AdapterCorrupt,
    AdapterError,
    AdapterFilesNotFound,
    AdapterMemoryExceeded,
    AdapterNameTaken,
    ModelNotFound,
)
from tests.adapters.conftest import PROMPT
from tests.parity.oracle import Oracle, World, assert_close, count_ties, greedy, make_even_adapter, prompt_of
from tests.tiny import ALL_PROJECTIONS, edit_json

GOOD_BYTES = 4 * 2 * (8 * 64 + 64 * 8 + 8 * 64 + 32 * 8)


@pytest.fixture(scope="module")
def other(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_even_adapter(llama, tmp_path_factory.mktemp("other") / "other", seed=9, target_modules=ALL_PROJECTIONS)


def test_r054_a_name_loaded_again_answers_with_the_new_weights(
    llm: LLM, oracle: Oracle, good: Path, other: Path
) -> None:
    expected = {path: oracle.logits(PROMPT, path) for path in (good, other)}
    answers: dict[Path, set[tuple[int, ...]]] = {good: set(), other: set()}
    for round_ in range(20):
        path = (good, other)[round_ % 2]
        llm.load_adapter("a", path)
        answers[path].add(tuple(greedy(llm, [("a", PROMPT)], 8)[0]))
        assert_close(llm.logits(PROMPT, adapter="a"), expected[path])
        llm.unload_adapter("a")
    assert [len(seen) for seen in answers.values()] == [1, 1]
    assert answers[good] != answers[other]
    for path, [answer] in answers.items():
        assert count_ties(oracle.logits([*PROMPT, *answer], path)[len(PROMPT) - 1 : -1], answer) == 0


def test_r060_a_failed_load_leaves_the_adapter_of_that_name_as_it_was(llm: LLM, good: Path, tmp_path: Path) -> None:
    loaded = llm.load_adapter("a", good)
    before = llm.logits(PROMPT, adapter="a")
    for path in (tmp_path / "missing", tmp_path, good):
        with pytest.raises((AdapterNameTaken, AdapterFilesNotFound)):
            llm.load_adapter("a", path)
        assert llm.adapters == {"a": loaded}
        assert llm.logits(PROMPT, adapter="a").equal(before)
    llm.unload_adapter("a")


def test_r060_a_name_that_cannot_be_replaced_keeps_the_adapter_it_has(llm: LLM, good: Path, tmp_path: Path) -> None:
    loaded = llm.load_adapter("a", good)
    before = llm.logits(PROMPT, adapter="a")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(AdapterFilesNotFound):
            llm.load_adapter("a", path, replace=True)
        assert llm.adapters == {"a": loaded}
        assert llm.logits(PROMPT, adapter="a").equal(before)
    llm.unload_adapter("a")


def test_a_replaced_name_answers_with_the_new_weights_and_the_old_ones_are_gone(
    llm: LLM, good: Path, other: Path
) -> None:
    old = weakref.ref(llm.load_adapter("a", good, replace=True))
    before = llm.logits(PROMPT, adapter="a")
    llm.load_adapter("a", other, replace=True)
    assert (llm.logits(PROMPT, adapter="a") - before).abs().max() > 1e-2
    gc.collect()
    assert old() is None
    llm.unload_adapter("a")


def test_the_files_may_change_or_go_while_an_adapter_is_resident(llm: LLM, copy: Callable[..., Path]) -> None:
    adapter = copy()
    llm.load_adapter("a", adapter)
    before = llm.logits(PROMPT, adapter="a")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert llm.logits(PROMPT, adapter="a").equal(before)
    shutil.rmtree(adapter)
    assert llm.logits(PROMPT, adapter="a").equal(before)
    llm.unload_adapter("a")


def test_an_evicted_adapter_whose_files_have_changed_is_an_error_and_the_others_answer(
    llama: Path, good: Path, other: Path, copy: Callable[..., Path]
) -> None:
    changing = copy()
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapter_memory_bytes=64 << 10, adapters={"a": changing})
    llm.load_adapter("b", other)
    before = llm.logits(PROMPT, adapter="a")
    after_b = llm.logits(PROMPT, adapter="b")
    edit_json(changing / "adapter_config.json", lora_alpha=3)
    for _ in range(2):
        with pytest.raises(AdapterChanged, match="adapter a: "):
            llm.generate([{"prompt_token_ids": PROMPT}] * 2, adapter=["b", "a"])
        with pytest.raises(AdapterChanged):
            llm.logits(PROMPT, adapter="a")
        assert llm.logits(PROMPT, adapter="b").equal(after_b)
    shutil.rmtree(changing)
    with pytest.raises(AdapterFilesNotFound):
        llm.logits(PROMPT, adapter="a")
    llm.load_adapter("a", good, replace=True)
    assert llm.logits(PROMPT, adapter="a").equal(before)


def test_r059_an_engine_with_one_bad_adapter_does_not_start_and_names_it(
    llama: Path, good: Path, copy: Callable[..., Path]
) -> None:
    bad = copy(arrow_config={"top_k": 2})
    with pytest.raises(AdapterError, match=r"adapter bad: .*arrow_config"):
        LLM(llama, kv_cache_bytes=1 << 20, adapters={"good": good, "bad": bad, "other": good})


def test_adapters_given_at_the_start_answer_at_once(llama: Path, good: Path, other: Path, oracle: Oracle) -> None:
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapters={"good": good, "other": str(other)})
    assert list(llm.adapters) == ["good", "other"]
    assert_close(llm.logits(PROMPT, adapter="other"), oracle.logits(PROMPT, other))


def test_factors_saved_in_bfloat16_take_half_the_memory_and_say_the_same(
    llama: Path, tmp_path: Path, good: Path, oracle: Oracle
) -> None:
    def rounded(name: str, dtype: torch.dtype) -> Path:
        folder = Path(shutil.copytree(good, tmp_path / name))
        tensors = load_file(folder / "adapter_model.safetensors")
        halves = {key: tensor.bfloat16().to(dtype) for key, tensor in tensors.items()}
        save_file(halves, folder / "adapter_model.safetensors")
        return folder

    paths = {"half": rounded("half", torch.bfloat16), "same": rounded("same", torch.float32), "exact": good}
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapters=paths)
    sizes = {name: adapter.num_bytes for name, adapter in llm.adapters.items()}
    assert sizes == {"half": GOOD_BYTES // 2, "same": GOOD_BYTES // 2, "exact": GOOD_BYTES}
    assert_close(llm.logits(PROMPT, adapter="half"), oracle.logits(PROMPT, paths["half"]))
    assert torch.equal(llm.logits(PROMPT, adapter="half"), llm.logits(PROMPT, adapter="same"))
    assert_close(llm.logits(PROMPT, adapter={"half": 0.25, "same": 0.75}), llm.logits(PROMPT, adapter="half"))
    rounding = LLM(llama, kv_cache_bytes=1 << 20, adapter_dtype="bfloat16", adapters={"exact": good})
    assert rounding.adapters["exact"].num_bytes == GOOD_BYTES // 2
    assert torch.equal(rounding.logits(PROMPT, adapter="exact"), llm.logits(PROMPT, adapter="half"))
    assert not torch.equal(llm.logits(PROMPT, adapter="exact"), llm.logits(PROMPT, adapter="half"))


def test_what_does_not_fit_any_more_is_loaded_without_evicting_anything(llama: Path, good: Path, other: Path) -> None:
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapter_memory_bytes=64 << 10)
    first = llm.load_adapter("first", good)
    assert first.num_bytes == GOOD_BYTES
    before = llm.logits(PROMPT, adapter="first")
    second = llm.load_adapter("second", other)
    assert llm.adapters == {"first": first, "second": second}
    assert llm.residency == {"first": "resident", "second": "absent"}
    moved = llm.logits(PROMPT, adapter="second")
    assert (moved - before).abs().max() > 1e-2
    assert llm.residency == {"first": "absent", "second": "resident"}
    assert llm.logits(PROMPT, adapter="first").equal(before)
    assert llm.logits(PROMPT, adapter="second").equal(moved)


def test_an_adapter_larger_than_the_whole_budget_is_refused_unread(llama: Path, good: Path) -> None:
    file_bytes = (good / "adapter_model.safetensors").stat().st_size
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapter_memory_bytes=file_bytes - 1)
    with pytest.raises(AdapterMemoryExceeded, match=rf"got: {file_bytes} bytes; allowed: {file_bytes - 1} bytes"):
        llm.load_adapter("large", good)
    assert not llm.adapters


def test_an_adapter_whose_float32_form_does_not_fit_is_refused_though_its_file_would(
    llama: Path, copy: Callable[..., Path]
) -> None:
    adapter = copy()
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor.half() for name, tensor in load(path.read_bytes()).items()}, path)
    assert path.stat().st_size < GOOD_BYTES
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapter_memory_bytes=GOOD_BYTES - 1)
    with pytest.raises(AdapterMemoryExceeded, match=f"got: {GOOD_BYTES} bytes; allowed: {GOOD_BYTES - 1} bytes"):
        llm.load_adapter("a", adapter)
    assert not llm.adapters


def adapter_called(name: str, llm: LLM, path: Path) -> Adapter:
    adapter = llm.load_adapter(name, path)
    llm.unload_adapter(name)
    return adapter


def test_an_adapter_is_needed_until_its_name_and_the_last_hold_are_gone(llm: LLM, good: Path) -> None:
    adapter = adapter_called("a", llm, good)
    forgotten: list[str] = []
    registry = AdapterRegistry(base_name="base", forget=forgotten.append)
    registry.add(adapter)
    held = [registry.acquire("a"), registry.acquire("a")]
    assert held == [adapter, adapter]
    assert registry.remove("a") is adapter
    assert (dict(registry.adapters), registry.num_users(adapter.digest)) == ({}, 2)
    with pytest.raises(ModelNotFound):
        registry.acquire("a")
    registry.release(adapter)
    assert not forgotten
    registry.release(adapter)
    assert forgotten == [adapter.digest]


def test_a_replaced_adapter_is_needed_until_its_last_hold_is_released(llm: LLM, good: Path, other: Path) -> None:
    old, new = adapter_called("a", llm, good), adapter_called("a", llm, other)
    forgotten: list[str] = []
    registry = AdapterRegistry(base_name="base", forget=forgotten.append)
    registry.add(old)
    assert registry.acquire("a") is old
    with pytest.raises(AdapterNameTaken):
        registry.add(new)
    registry.add(new, replace=True)
    assert registry.acquire("a") is new
    assert not forgotten
    registry.release(old)
    assert forgotten == [old.digest]
    registry.add(new, replace=True)
    registry.release(new)
    assert forgotten == [old.digest]


def test_one_content_under_two_names_is_needed_until_both_are_gone(llm: LLM, good: Path) -> None:
    one, two = adapter_called("one", llm, good), adapter_called("two", llm, good)
    forgotten: list[str] = []
    registry = AdapterRegistry(base_name="base", forget=forgotten.append)
    registry.add(one)
    registry.add(two)
    total = registry.acquire("one:0.5+two:0.5")
    registry.remove("one")
    registry.remove("two")
    assert not forgotten
    registry.release(total)
    assert sorted(forgotten) == sorted([one.digest, total.digest])


def test_unloading_frees_the_adapters_tensors(llm: LLM, good: Path) -> None:
    adapter = llm.load_adapter("a", good)
    greedy(llm, [("a", PROMPT), (None, PROMPT)], 4)
    alive = weakref.ref(adapter)
    llm.unload_adapter("a")
    del adapter
    gc.collect()
    assert alive() is None


def test_r056_thirty_concurrent_loads_of_one_name_make_one_adapter(
    llm: LLM, oracle: Oracle, good: Path, other: Path
) -> None:
    barrier = threading.Barrier(30)

    def attempt(index: int) -> str | None:
        barrier.wait()
        try:
            return llm.load_adapter("a", (good, other)[index % 2]).digest
        except AdapterNameTaken:
            return None

    with ThreadPoolExecutor(30) as pool:
        digests = [digest for digest in pool.map(attempt, range(30)) if digest is not None]
    try:
        assert len(digests) == 1
        assert [adapter.digest for adapter in llm.adapters.values()] == digests
        winner = good if llm.adapters["a"].ranks and len(llm.adapters["a"].modules) == 4 else other
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, winner))
    finally:
        llm.unload_adapter("a")


def test_r056_loads_and_unloads_at_once_leave_a_list_that_tells_the_truth(llm: LLM, good: Path) -> None:
    barrier = threading.Barrier(30)

    def attempt(index: int) -> int:
        barrier.wait()
        change = 0
        for _ in range(5):
            try:
                if index % 2:
                    llm.load_adapter("a", good)
                    change += 1
                else:
                    llm.unload_adapter("a")
                    change -= 1
            except (AdapterNameTaken, ModelNotFound):
                continue
        return change

    with ThreadPoolExecutor(30) as pool:
        left = sum(pool.map(attempt, range(30)))
    assert left == len(llm.adapters)
    if left:
        greedy(llm, [("a", PROMPT)], 2)
        llm.unload_adapter("a")
    with pytest.raises(ModelNotFound):
        llm.logits(PROMPT, adapter="a")


def test_concurrent_loads_never_exceed_the_budget(llama: Path, good: Path, tmp_path: Path) -> None:
    folders = []
    for index in range(8):
        folders.append(Path(shutil.copytree(good, tmp_path / f"a{index}")))
        edit_json(folders[-1] / "adapter_config.json", lora_alpha=index + 1)  # another digest, so nothing is shared
    llm = LLM(llama, kv_cache_bytes=1 << 20, adapter_memory_bytes=3 * GOOD_BYTES)
    barrier = threading.Barrier(8)

    def attempt(index: int) -> None:
        barrier.wait()
        llm.load_adapter(f"a{index}", folders[index])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, range(8)))
    assert sorted(llm.residency.values()) == ["absent"] * 5 + ["resident"] * 3


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_r089_two_hundred_cycles_of_load_use_and_unload_leave_memory_files_and_threads_flat(
    llm: LLM, other: Path
) -> None:
    process = psutil.Process()
    sizes = []
    for cycle in range(200):
        llm.load_adapter("a", other)
        greedy(llm, [("a", PROMPT[:4]), (None, PROMPT[:4])], 1)
        llm.unload_adapter("a")
        if cycle >= 20:
            sizes.append(resident())
        if cycle == 20:
            files, threads = process.num_fds(), process.num_threads()
    slope = (sum(sizes[-20:]) - sum(sizes[:20])) / 20 / (len(sizes) - 20)
    assert slope < 50 << 10
    # Fewer when other tests' leftovers went meanwhile.
    assert process.num_fds() <= files
    assert process.num_threads() <= threads


def test_r088_the_memory_of_many_adapters_returns(llm: LLM, llama: Path, tmp_path: Path) -> None:
    large = make_even_adapter(llama, tmp_path / "large", r=700, target_modules=ALL_PROJECTIONS)
    assert llm.load_adapter("warm", large).num_bytes > 4 << 20
    llm.unload_adapter("warm")
    start, peaks = resident(), []
    for _ in range(2):
        for index in range(20):
            edit_json(large / "adapter_config.json", lora_alpha=index + 1)  # another digest, so nothing is shared
            llm.load_adapter(f"a{index}", large)
            llm.logits(PROMPT[:2], adapter=f"a{index}")
        peaks.append(resident())
        for index in range(20):
            llm.unload_adapter(f"a{index}")
        assert resident() - start < 10 << 20
    assert peaks[0] - start > 60 << 20
    assert peaks[1] - peaks[0] < 10 << 20


def test_r051_a_hundred_failed_loads_leave_nothing(llm: LLM, llama: Path, tmp_path: Path) -> None:
    large = make_even_adapter(llama, tmp_path / "large", r=700, target_modules=ALL_PROJECTIONS)
    edit_json(large / "adapter_config.json", rank_pattern={"layers.1.mlp.down_proj": 4})
    start = 0
    for attempt in range(100):
        with pytest.raises(AdapterCorrupt, match="700 in the weights, 4 in"):
            llm.load_adapter("a", large)
        if attempt == 10:
            start = resident()
    assert resident() - start < 10 << 20
    assert not llm.adapters


def test_r058_an_adapters_whole_life_leaves_no_trace_in_the_base(llama: Path, oracle: Oracle, other: Path) -> None:
    llm = LLM(llama, kv_cache_bytes=1 << 20)
    world = World(base=llama, llm=llm, oracle=oracle)
    prompts = [prompt_of(length, length) for length in (2, 17, 40)]
    before = [llm.logits(prompt) for prompt in prompts]
    with world.loaded({"a": other}):
        moved = [llm.logits(prompt, adapter="a") for prompt in prompts]
        during = [llm.logits(prompt) for prompt in prompts]
    after = [llm.logits(prompt) for prompt in prompts]
    for quiet, loud, silent, gone in zip(before, moved, during, after, strict=True):
        assert (loud - quiet).abs().max() > 1e-2
        assert torch.equal(silent, quiet)
        assert torch.equal(gone, quiet)
