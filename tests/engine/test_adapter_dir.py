"""A folder of adapters, each of which answers to its folder's name and is read when it is first asked for."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from graftlm import LLM, AsyncLLM
from graftlm.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterFilesNotFound,
    AdapterMemoryExceeded,
    AdapterNameTaken,
    AdapterUnsupported,
    ConfigurationError,
    ModelNotFound,
)
from tests.engine.rig import BLOCK_BYTES, greedy, one, prompt, token_ids
from tests.tiny import edit_json

PARAMS = greedy(12, ignore_eos=True)
REQUEST = prompt(8)


@pytest.fixture
def folder(adapters: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "many"
    for name, source in adapters.items():
        shutil.copytree(source, path / name)
    return path


def open_llm(llama: Path, folder: Path, **more: object) -> LLM:
    return LLM(llama, name="tiny", adapter_dir=folder, kv_cache_bytes=64 * BLOCK_BYTES, **more)


def test_a_folders_children_answer_and_are_read_when_they_are_asked_for(
    llm: LLM, llama: Path, folder: Path, adapters: dict[str, Path]
) -> None:
    (folder / "not an adapter").mkdir()
    (folder / "README.md").write_text("a file")
    lazy = open_llm(llama, folder)
    assert not lazy.adapters
    assert lazy.residency == {"blue": "absent", "green": "absent", "red": "absent"}
    assert token_ids(one(lazy, REQUEST, PARAMS, "green")) == token_ids(one(llm, REQUEST, PARAMS, "green"))
    assert list(lazy.adapters) == ["green"]
    assert lazy.residency == {"green": "resident", "blue": "absent", "red": "absent"}
    outputs = lazy.generate([REQUEST] * 2, PARAMS, adapter=["red", {"red": 0.5, "blue": 2}])
    expected = llm.generate([REQUEST] * 2, PARAMS, adapter=["red", {"red": 0.5, "blue": 2}])
    assert [token_ids(output) for output in outputs] == [token_ids(output) for output in expected]
    shutil.copytree(adapters["red"], folder / "later")
    assert token_ids(one(lazy, REQUEST, PARAMS, "later")) == token_ids(one(llm, REQUEST, PARAMS, "red"))
    for name in ("README.md", "not an adapter", "nope", "..", "red/..", "../many/red", str(folder / "red"), ""):
        with pytest.raises(ModelNotFound):
            lazy.generate([REQUEST], PARAMS, adapter=name)


def test_ten_thousand_folders_cost_their_names(llama: Path, tmp_path: Path, adapters: dict[str, Path]) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for index in range(10_000):
        (many / f"tenant-{index}").mkdir()
    shutil.copytree(adapters["red"], many / "tenant-7777", dirs_exist_ok=True)
    lazy = open_llm(llama, many)
    assert len(lazy.residency) == 10_000
    assert one(lazy, REQUEST, PARAMS, "tenant-7777").finished
    assert list(lazy.adapters) == ["tenant-7777"]
    with pytest.raises(AdapterFilesNotFound, match="adapter tenant-1: "):
        one(lazy, REQUEST, PARAMS, "tenant-1")


def test_a_broken_adapter_says_so_when_it_is_asked_for_and_answers_once_it_is_repaired(
    llm: LLM, llama: Path, folder: Path, adapters: dict[str, Path]
) -> None:
    weights = folder / "red" / "adapter_model.safetensors"
    weights.write_bytes(b"PK\x03\x04")
    lazy = open_llm(llama, folder)
    for _ in range(2):
        with pytest.raises(AdapterCorrupt, match="adapter red: "):
            lazy.generate([REQUEST, REQUEST], PARAMS, adapter=["green", "red"])
    assert list(lazy.adapters) == ["green"]
    shutil.copy(adapters["red"] / weights.name, weights)
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == token_ids(one(llm, REQUEST, PARAMS, "red"))


def test_what_is_retrained_on_disk_is_read_anew_after_it_was_unloaded_or_evicted(
    llm: LLM, llama: Path, folder: Path
) -> None:
    old = token_ids(one(llm, REQUEST, PARAMS, "red"))
    room = max(adapter.num_bytes for adapter in llm.adapters.values()) + (8 << 10)
    lazy = open_llm(llama, folder, adapter_memory_bytes=room)
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == old
    edit_json(folder / "red" / "adapter_config.json", lora_alpha=64)
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == old
    lazy.unload_adapter("red")
    new = token_ids(one(lazy, REQUEST, PARAMS, "red"))
    assert new != old
    with pytest.raises(ModelNotFound):
        lazy.unload_adapter("green")
    edit_json(folder / "red" / "adapter_config.json", lora_alpha=16)
    one(lazy, REQUEST, PARAMS, "blue")
    assert lazy.residency["red"] == "absent"
    with pytest.raises(AdapterError, match="have changed since it was loaded"):
        one(lazy, REQUEST, PARAMS, "red")
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == old


def test_r096_what_leads_out_of_the_folder_is_not_served(
    llama: Path, folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    (folder / "outside").symlink_to(adapters["red"])
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "within").symlink_to(folder / "green")
    (folder / "linked").mkdir()
    for file in adapters["red"].iterdir():
        (folder / "linked" / file.name).symlink_to(file)
    lazy = open_llm(llama, folder)
    assert set(lazy.residency) == {"red", "green", "blue", "within", "linked"}
    for name in ("outside", "loop"):
        with pytest.raises(ModelNotFound):
            one(lazy, REQUEST, PARAMS, name)
    with pytest.raises(AdapterUnsupported, match="links to outside"):
        one(lazy, REQUEST, PARAMS, "linked")
    assert one(lazy, REQUEST, PARAMS, "within").finished
    with pytest.raises(ConfigurationError):
        open_llm(llama, tmp_path / "nothing")


def test_an_adapter_given_by_name_goes_before_the_folders(
    llm: LLM, llama: Path, folder: Path, adapters: dict[str, Path]
) -> None:
    lazy = open_llm(llama, folder)
    with pytest.raises(AdapterNameTaken):
        lazy.load_adapter("red", adapters["green"])
    lazy.load_adapter("red", adapters["green"], replace=True)
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == token_ids(one(llm, REQUEST, PARAMS, "green"))
    lazy.unload_adapter("red")
    assert token_ids(one(lazy, REQUEST, PARAMS, "red")) == token_ids(one(llm, REQUEST, PARAMS, "red"))
    with pytest.raises(AdapterMemoryExceeded):
        one(open_llm(llama, folder, adapter_memory_bytes=100), REQUEST, PARAMS, "red")


def test_many_requests_for_one_unread_adapter_read_it_once(
    llm: LLM, llama: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = token_ids(one(llm, REQUEST, PARAMS, "blue"))

    async def scenario() -> None:
        engine = AsyncLLM(llama, name="tiny", adapter_dir=folder, kv_cache_bytes=64 * BLOCK_BYTES)
        outputs = await asyncio.gather(*(engine.generate(REQUEST, PARAMS, adapter="blue") for _ in range(20)))
        assert {token_ids(output) for output in outputs} == {wanted}
        chat = await engine.apply_chat_template([{"role": "user", "content": "hi"}], adapter="green")
        assert chat
        assert set(engine.adapters) == {"blue", "green"}
        with pytest.raises(ModelNotFound):
            await engine.generate(REQUEST, PARAMS, adapter="nope")
        await engine.shutdown()

    with caplog.at_level("INFO", logger="graftlm.adapters.load"):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len([record for record in caplog.records if "adapter blue: bound" in record.getMessage()]) == 1


def test_a_request_is_answered_though_its_adapter_is_forgotten_while_the_request_is_made(
    llm: LLM, llama: Path, folder: Path
) -> None:
    expected = token_ids(one(llm, REQUEST, PARAMS, "red"))

    async def ask(lazy: AsyncLLM) -> None:
        for _ in range(10):
            output = await lazy.generate(REQUEST, PARAMS, adapter="red")
            assert token_ids(output) == expected

    async def forget(lazy: AsyncLLM, asking: asyncio.Future[object]) -> int:
        times = 0
        while not asking.done():
            with contextlib.suppress(ModelNotFound):
                await lazy.unload_adapter("red")
                times += 1
        return times

    async def run() -> int:
        lazy = AsyncLLM(llama, name="tiny", adapter_dir=folder, kv_cache_bytes=64 * BLOCK_BYTES)
        asking = asyncio.gather(*(ask(lazy) for _ in range(4)))
        try:
            times, _ = await asyncio.gather(forget(lazy, asking), asking)
        finally:
            await lazy.shutdown()
        return times

    assert asyncio.run(run()) > 20
