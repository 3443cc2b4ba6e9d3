"""The second start of a checkpoint that is quantised while it is loaded reads what the first one wrote."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from graftlm import LLM
from graftlm.checkpoint.file_digests import FileDigests, file_digest
from graftlm.checkpoint.file_identity import FileIdentity
from graftlm.checkpoint.open import open_checkpoint
from graftlm.models.build import build_decoder
from graftlm.models.quantized_cache import QuantizedCache, open_quantized_cache
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.methods import read_quantization_config
from graftlm.quantization.policy import LoadPolicy
from graftlm.quantization.written import WRITTEN_FORMATS
from tests.parity.oracle import LOUD, make_even_adapter, prompt_of
from tests.tiny import make_llama

PROMPT = prompt_of(20, 1)
CPU = torch.device("cpu")
FROM_CACHE, FRESH = "(7 of them from the cache)", "(0 of them from the cache)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRAFT_CACHE", str(folder))
    caplog.set_level(logging.INFO, logger="graftlm")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "llama", num_hidden_layers=1)


@pytest.fixture
def base(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "base"))


def logits(base: Path, **options: Any) -> torch.Tensor:
    llm = LLM(base, kv_cache_bytes=1 << 20, **{"quantization": "nf4", **options})
    return llm.logits(PROMPT, adapter=next(iter(llm.adapters), None))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_the_second_start_reads_the_same_bits(
    quantization: str, base: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(base, quantization=quantization)
    assert FRESH in caplog.text
    [entry] = entries(cache)
    caplog.clear()
    assert torch.equal(logits(base, quantization=quantization), first)
    assert FROM_CACHE in caplog.text
    assert entries(cache) == [entry]
    assert torch.equal(logits(base, quantization=quantization, quantization_cache=False), first)
    assert [path.suffix for path in cache.iterdir() if path.is_file()] == [".safetensors"]


def test_the_entry_is_what_bitsandbytes_stores(base: Path, cache: Path) -> None:
    logits(base, quantization="nf4-double")
    [entry] = entries(cache)
    with safe_open(entry, framework="pt") as file:
        names = {name for name in file.keys() if name.startswith("model.layers.0.mlp.down_proj.")}  # noqa: SIM118
    parts = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", "quant_state.bitsandbytes__nf4")
    path = "model.layers.0.mlp.down_proj.weight"
    assert names == {path, *(f"{path}.{part}" for part in parts)}


def test_an_adapter_over_cached_weights_is_the_adapter_over_fresh_ones(base: Path, cache: Path, tmp_path: Path) -> None:
    adapters = {"a": make_even_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])}
    fresh = logits(base, adapters=adapters)
    assert torch.equal(logits(base, adapters=adapters), fresh)
    assert (fresh - logits(base)).abs().max() > LOUD


def test_without_the_cache_nothing_is_written(base: Path, cache: Path) -> None:
    logits(base, quantization_cache=False)
    logits(base, quantization=None)
    assert not cache.exists()


def test_every_setting_has_an_entry_of_its_own(base: Path, cache: Path) -> None:
    for options in (
        {},
        {"quantization": "fp4"},
        {"dtype": "bfloat16"},
        {"quantize_head": True},
        {"quantize_skip": ["o_proj"]},
    ):
        fresh = logits(base, quantization_cache=False, **options)
        assert torch.equal(logits(base, **options), fresh)
    assert len(entries(cache)) == 5


def test_changed_weights_are_never_answered_from_the_old_entry(base: Path, cache: Path) -> None:
    """Same size, inode and mtime: what identifies a file is what is in it."""
    weights = base / "model.safetensors"
    before, status = logits(base), weights.stat()
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    tensors["model.layers.0.self_attn.q_proj.weight"].neg_()
    save_file(tensors, base / "changed", metadata={"format": "pt"})
    with weights.open("r+b") as file:
        file.write((base / "changed").read_bytes())
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_ino) == (status.st_size, status.st_ino)
    after = logits(base)
    assert (after - before).abs().max() > LOUD
    assert torch.equal(after, logits(base, quantization_cache=False))


@pytest.mark.parametrize("late", [False, True], ids=["after it was opened", "while it was read"])
def test_a_file_that_is_replaced_meanwhile_leaves_no_entry(
    late: bool, base: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_llama(tmp_path / "other", seed=1, num_hidden_layers=1)
    checkpoint, policy = open_checkpoint(base), LoadPolicy(quantization="nf4", keep_stored=False)
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    opened = open_quantized_cache(checkpoint, policy, **settings) if late else None
    (other / "model.safetensors").replace(base / "model.safetensors")
    if not late:
        opened = open_quantized_cache(checkpoint, policy, **settings)
        assert opened is None
    build_decoder(checkpoint, policy=policy, cache=opened, **settings)
    assert "has changed since it was opened" in caplog.text
    assert entries(cache) == []


def test_a_digest_is_remembered_only_while_the_file_is_the_same(tmp_path: Path, base: Path) -> None:
    # This file has not changed for longer than clocks tick.
    source = Path(torch.__file__)
    digests = FileDigests(tmp_path / "digests")
    assert digests.digest(source, FileIdentity.of(source)) == file_digest(source)
    [record] = (tmp_path / "digests").iterdir()
    record.write_text(record.read_text().replace(file_digest(source), "remembered"))
    assert digests.digest(source, FileIdentity.of(source)) == "remembered"
    for damaged in (record.read_text().replace('"size": ', '"size": 1'), "{", "[]", ""):
        record.write_text(damaged)
        assert digests.digest(source, FileIdentity.of(source)) == file_digest(source)
    (tmp_path / "file").touch()
    nowhere = FileDigests(tmp_path / "file" / "digests")
    assert nowhere.digest(source, FileIdentity.of(source)) == file_digest(source)
    digests.digest(base / "config.json", FileIdentity.of(base / "config.json"))
    assert list((tmp_path / "digests").iterdir()) == [record], "a new file's digest was remembered"


def _cut(entry: Path) -> None:
    os.truncate(entry, entry.stat().st_size - 64)


def _empty(entry: Path) -> None:
    os.truncate(entry, 0)


def _flip(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-1000] ^= 1
    entry.write_bytes(content)


def _unreadable(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


@pytest.mark.parametrize("damage", [_cut, _empty, _flip])
def test_a_damaged_entry_is_made_anew(damage: Any, base: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = logits(base)
    [entry] = entries(cache)
    damage(entry)
    caplog.clear()
    assert torch.equal(logits(base), first)
    assert caplog.text.count("is quantised anew") == 1
    assert FRESH in caplog.text
    assert entries(cache) == [entry]
    caplog.clear()
    assert torch.equal(logits(base), first)
    assert FROM_CACHE in caplog.text


def test_an_entry_that_cannot_be_read_does_not_stop_serving(
    base: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(base)
    [entry] = entries(cache)
    _unreadable(entry)
    assert torch.equal(logits(base), first)
    assert "is quantised anew" in caplog.text
    assert "not kept for the next start" in caplog.text


def test_an_entry_that_lacks_a_module_is_removed_and_the_rest_is_right(
    base: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(base)
    [entry] = entries(cache)
    key = entry.stem.partition("-")[0]
    tensors = {name: tensor.clone() for name, tensor in load_file(entry).items() if "layers.0.mlp" not in name}
    save_file(tensors, cache / "short", metadata={"format": "pt"})
    entry.unlink()
    (cache / "short").rename(cache / f"{key}-{file_digest(cache / 'short')}.safetensors")
    caplog.clear()
    assert torch.equal(logits(base), first)
    assert caplog.text.count("is quantised anew") == 1
    assert entries(cache) == []
    logits(base)
    assert entries(cache) == [entry]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files may not grow beyond 16 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_does_not_stop_serving(
    base: Path, cache: Path, full_disk: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert torch.equal(logits(base, quantization="int8"), logits(base, quantization="int8", quantization_cache=False))
    assert "not kept for the next start" in caplog.text
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_cache_folder_that_cannot_be_one_does_not_stop_serving(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "file" / "cache"))
    assert torch.equal(logits(base), logits(base, quantization_cache=False))
    assert "not kept for the next start" in caplog.text


def test_several_starts_at_once_leave_one_entry(base: Path, cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        answers = pool.map(logits, [base] * 3)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert torch.equal(logits(base), answers[0])
    assert len(entries(cache)) == 1
    assert not list(cache.glob("*.partial"))


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    weight_format = read_quantization_config(WRITTEN_FORMATS["int8"].config([], "float32"))
    weight = QUANTIZERS["int8"].quantize(torch.randn(64, 64), dtype=torch.float32)

    def write(key: str) -> None:
        cache = QuantizedCache(tmp_path, key, weight_format, sources={}, max_bytes=3 * 5000)
        cache.add("layer", weight)
        cache.save()
        for order, entry in enumerate(sorted(entries(tmp_path), key=lambda entry: entry.stat().st_mtime_ns)):
            os.utime(entry, (order, order))

    for key in ("a", "b", "c"):
        write(key)
    assert QuantizedCache(tmp_path, "a", weight_format, sources={}).read(
        "layer", (64, 64), dtype=torch.float32, device=CPU
    )
    (tmp_path / "killed.partial").touch()
    os.utime(tmp_path / "killed.partial", (0, 0))
    (tmp_path / "writing.partial").touch()
    write("d")
    assert [entry.name[0] for entry in entries(tmp_path)] == ["a", "c", "d"]
    assert [partial.name for partial in tmp_path.glob("*.partial")] == ["writing.partial"]


def test_nothing_to_quantise_needs_no_cache(base: Path) -> None:
    checkpoint = open_checkpoint(base)
    assert open_quantized_cache(checkpoint, LoadPolicy(), dtype=torch.float32, device=CPU) is None
