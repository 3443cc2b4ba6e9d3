"""Weight files that are not what they say."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load

from graftlm import LLM
from graftlm.errors import AdapterCorrupt, AdapterError, AdapterMemoryExceeded, AdapterUnsupported
from tests.adapters.conftest import PROMPT
from tests.parity.oracle import Oracle, assert_close

WEIGHTS = "adapter_model.safetensors"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def test_r008_a_pickle_renamed_to_safetensors_is_recognised_and_never_unpickled(
    copy: Callable[..., Path], refuse: Callable[..., str], tmp_path: Path
) -> None:
    adapter = copy()
    tensors = load((adapter / WEIGHTS).read_bytes())
    torch.save(tensors, adapter / WEIGHTS)
    refuse(adapter, AdapterCorrupt, "not a safetensors file: it looks like a pickle or zip")
    torch.save(tensors, adapter / WEIGHTS, _use_new_zipfile_serialization=False)
    refuse(adapter, AdapterCorrupt, "not a safetensors file: it looks like a pickle or zip")
    (adapter / WEIGHTS).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    refuse(adapter, AdapterCorrupt, "not a safetensors file: it looks like a pickle or zip")
    assert not (tmp_path / "marker").exists()


CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "lfs_pointer": (lambda whole: LFS_POINTER, "is a Git LFS pointer"),
    "empty": (lambda whole: b"", "not a complete safetensors file; got: 0 bytes"),
    "seven_bytes": (lambda whole: whole[:7], "not a complete safetensors file"),
    "no_header": (lambda whole: b"\0" * 8, "not a complete safetensors file"),
    "half_a_header": (lambda whole: whole[:200], "not a complete safetensors file"),
    "truncated": (lambda whole: whole[:-100], "is damaged"),
    "one_byte_short": (lambda whole: whole[:-1], "is damaged"),
    "one_byte_more": (lambda whole: whole + b"\0", "is damaged"),
    "header_length_2_60": (lambda whole: struct.pack("<Q", 2**60) + whole[8:], "not a complete safetensors file"),
    "header_length_2_64_1": (lambda whole: b"\xff" * 8 + whole[8:], "not a complete safetensors file"),
    "text": (lambda whole: b"<!DOCTYPE html><html>404</html>" * 20, "not a complete safetensors file"),
    "zeros": (lambda whole: b"\0" * 10_000, "not a complete safetensors file"),
    "gguf": (lambda whole: b"GGUF" + b"\0" * 1000, "not a complete safetensors file"),
}


@pytest.mark.parametrize(("spoil", "match"), CONTENTS.values(), ids=CONTENTS)
def test_r008_r100_a_file_that_is_damaged_is_refused_in_words(
    spoil: Callable[[bytes], bytes], match: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    adapter = copy()
    (adapter / WEIGHTS).write_bytes(spoil((adapter / WEIGHTS).read_bytes()))
    refuse(adapter, AdapterCorrupt, match)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, Any] = {
    "beyond_the_end": {"a": entry([2, 2], 0, 160)},
    "far_beyond_the_end": {"a": entry([2**40], 0, 2**42)},
    "begin_after_end": {"a": entry([2, 2], 16, 0)},
    "overlap": {"a": entry([2, 2], 0, 16), "b": entry([2, 2], 0, 16)},
    "partial_overlap": {"a": entry([2], 0, 8), "b": entry([3], 4, 16)},
    "hole": {"a": entry([1], 0, 4), "b": entry([2], 8, 16)},
    "product_too_small": {"a": entry([1, 1], 0, 16)},
    "product_too_large": {"a": entry([5, 5], 0, 16)},
    "negative_dimension": {"a": entry([-2, -2], 0, 16)},
    "negative_offset": {"a": entry([4], -16, 0)},
    "dimension_2_62": {"a": entry([2**62], 0, 16)},
    "dimensions_that_overflow_to_16": {"a": entry([2**62 + 1, 4], 0, 16)},
    "dimension_2_64": {"a": entry([2**64], 0, 16)},
    "none_of_2_63_columns": {"a": entry([0, 2**63], 0, 0), "b": entry([4], 0, 16)},
    "fraction": {"a": {"dtype": "F32", "shape": [2.0, 2.0], "data_offsets": [0, 16]}},
    "shape_of_text": {"a": {"dtype": "F32", "shape": "2,2", "data_offsets": [0, 16]}},
    "no_shape": {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
    "three_offsets": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}},
    "unknown_dtype": {"a": entry([4], 0, 16, "F33")},
    "four_bit_dtype": {"a": entry([32], 0, 16, "F4")},
    "exponent_dtype": {"a": entry([16], 0, 16, "F8_E8M0")},
    "metadata_of_numbers": {"__metadata__": {"a": 1}, "a": entry([4], 0, 16)},
    "list": [entry([4], 0, 16)],
    "duplicate_keys": b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "duplicate_fields": b'{"a":{"dtype":"F32","shape":[2,2],"shape":[4],"data_offsets":[0,16]}}',
    "not_utf8": b'{"\xff\xfe":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "deep": b'{"a":' * 50_000,
    "half": b'{"a":{"dtype":"F32","shape":[4],"data_off',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_r100_a_hostile_header_is_refused_at_once_and_takes_no_memory(
    header: Any, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    adapter = copy()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"\0" * 16)
    process = psutil.Process()
    before, started = process.memory_info().rss, time.process_time()
    refuse(adapter, AdapterCorrupt, r"adapter_model\.safetensors is (damaged|not a complete)")
    assert time.process_time() - started < 1
    assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize("length", [1152, 19280, 66176], ids=["pickle_4", "zip", "pickle_2"])
def test_a_header_length_that_looks_like_a_pickles_first_bytes_is_still_safetensors(
    length: int, llm: LLM, oracle: Oracle, good: Path, copy: Callable[..., Path]
) -> None:
    adapter = copy()
    content = (adapter / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + size].rstrip().ljust(length)
    assert struct.pack("<Q", length)[:2] in (b"PK", b"\x80\x02", b"\x80\x04")
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", length) + header + content[8 + size :])
    llm.load_adapter("a", adapter)
    try:
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, good))
    finally:
        llm.unload_adapter("a")


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__":{"format":"pt"}}'], ids=["empty", "metadata"])
def test_a_file_without_tensors_is_refused(
    header: bytes, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    adapter = copy()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    refuse(adapter, AdapterCorrupt, "holds no tensors")


def test_a_sparse_file_larger_than_the_budget_is_refused_unread(
    copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    adapter = copy()
    os.truncate(adapter / WEIGHTS, 1 << 40)
    refuse(adapter, AdapterMemoryExceeded, f"got: {1 << 40} bytes")


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._marker,))


@pytest.fixture(scope="module")
def trusting(llama: Path) -> LLM:
    """An engine that reads .bin files."""
    return LLM(llama, kv_cache_bytes=1 << 20, allow_pickle=True)


def as_pickle(adapter: Path, content: Any = None) -> Path:
    tensors = load((adapter / WEIGHTS).read_bytes())
    (adapter / WEIGHTS).unlink()
    torch.save(tensors if content is None else content, adapter / "adapter_model.bin")
    return adapter


def test_r095_a_bin_file_is_refused_unless_it_is_allowed(
    copy: Callable[..., Path], refuse: Callable[..., str], trusting: LLM, oracle: Oracle
) -> None:
    adapter = as_pickle(copy())
    refuse(adapter, AdapterUnsupported, "is a pickle, which can carry code")
    refuse(adapter / "adapter_model.bin", AdapterUnsupported, "is a pickle, which can carry code")
    trusting.load_adapter("a", adapter)
    assert_close(trusting.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, adapter))
    trusting.unload_adapter("a")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", ["whole", "inside", "zip"])
def test_r095_no_code_in_a_bin_file_ever_runs(
    place: str, protocol: int, copy: Callable[..., Path], refuse: Callable[..., str], trusting: LLM, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    adapter = copy()
    file = adapter / "adapter_model.bin"
    if place == "whole":
        file.write_bytes(pickle.dumps(Bomb(marker), protocol))
    else:
        tensors = {**load((adapter / WEIGHTS).read_bytes()), "extra": Bomb(marker)}
        torch.save(tensors, file, pickle_protocol=protocol, _use_new_zipfile_serialization=place == "zip")
    (adapter / WEIGHTS).unlink()
    refuse(adapter, AdapterUnsupported, "is a pickle")
    with pytest.raises(AdapterCorrupt, match="cannot be read weights-only"):
        trusting.load_adapter("a", adapter)
    assert not trusting.adapters
    assert not marker.exists()


def test_r095_beside_safetensors_pickles_of_every_name_are_not_even_opened(
    copy: Callable[..., Path], trusting: LLM, llm: LLM, oracle: Oracle, good: Path, tmp_path: Path
) -> None:
    adapter = copy()
    for name in ("adapter_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth", "tokenizer.pkl"):
        (adapter / name).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    for engine in (trusting, llm):
        engine.load_adapter("a", adapter)
        assert_close(engine.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, good))
        engine.unload_adapter("a")
    assert not (tmp_path / "marker").exists()


NOT_TENSORS: dict[str, Any] = {
    "list": [torch.ones(2)],
    "numbers": {"a": 1},
    "nested": {"state_dict": {"a": torch.ones(2)}},
    "nothing": {},
    "sparse": {"a.lora_A.weight": torch.eye(4).to_sparse()},
    "meta": {"a.lora_A.weight": torch.ones(4, device="meta")},
    "a_terabyte_of_one_number": {"a.lora_A.weight": torch.ones(1).expand(1 << 19, 1 << 19)},
}


@pytest.mark.parametrize("content", NOT_TENSORS.values(), ids=NOT_TENSORS)
def test_r095_a_bin_file_that_holds_no_plain_tensors_is_refused(
    content: Any, copy: Callable[..., Path], trusting: LLM
) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(AdapterCorrupt, match="tensor"):
        trusting.load_adapter("a", as_pickle(copy(), content))
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_r095_a_compressed_bin_file_is_refused(copy: Callable[..., Path], trusting: LLM, tmp_path: Path) -> None:
    adapter = as_pickle(copy())
    file = adapter / "adapter_model.bin"
    with zipfile.ZipFile(file) as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    with pytest.raises(AdapterCorrupt, match="the archive is compressed"):
        trusting.load_adapter("a", adapter)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_r095_a_damaged_bin_file_is_refused_wherever_it_is_cut_or_changed(
    zipped: bool, copy: Callable[..., Path], trusting: LLM
) -> None:
    adapter = copy()
    tensors = load((adapter / WEIGHTS).read_bytes())
    (adapter / WEIGHTS).unlink()
    file = adapter / "adapter_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    for cut in [0, 1, 2, 10, 100, 500, *range(1000, len(whole), len(whole) // 20)]:
        file.write_bytes(whole[:cut])
        with pytest.raises(AdapterCorrupt, match=r"adapter_model\.bin"):
            trusting.load_adapter("a", adapter)
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(0, 1500, (60,), generator=generator).tolist():
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with contextlib.suppress(AdapterError):
            trusting.load_adapter("a", adapter)
            trusting.unload_adapter("a")  # the change hit a date or padding that nothing reads
    assert not trusting.adapters
