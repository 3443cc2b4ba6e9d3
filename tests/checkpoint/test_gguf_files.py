"""GGUF files that are damaged, foreign or incomplete."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from graftlm import LLM
from graftlm.errors import CheckpointError
from tests.parity.gguf_writer import write_gguf
from tests.tiny import make_llama

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    base = make_llama(folder / "base", vocab_size=260)
    return write_gguf(base, folder / "model.gguf", Kind.Q8_0).read_bytes()


# Metadata that is enough for every architecture.
SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention__head_count": 4,
    "attention__head_count_kv": 4,
    "attention__layer_norm_epsilon": 1e-5,
    "attention__layer_norm_rms_epsilon": 1e-5,
}


def refusal(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        LLM(path, kv_cache_bytes=1 << 20)
    assert type(caught.value) is CheckpointError


def write(path: Path, architecture: str, *, tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """A small GGUF file with any metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    if metadata:
        writer.add_token_list(["a", "b", "c", "d"])
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key.replace('__', '.')}", value)
    for name, tensor in (tensors or {"token_embd.weight": np.ones((4, 32), dtype=np.float32)}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m.gguf", "mamba"), "cannot read from GGUF; got: mamba; allowed: bloom, falcon, gemma")


def test_a_gguf_file_that_lacks_metadata_is_refused_by_the_keys_name(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m.gguf", "llama"), r"lacks a metadata key; got: llama\.attention\.head_count")


def test_a_gguf_file_with_unknown_tensors_is_refused_by_their_names(tmp_path: Path) -> None:
    tensors = {"blk.0.ssm_conv.weight": np.ones((4, 32), dtype=np.float32)}
    path = write(tmp_path / "m.gguf", "llama", tensors=tensors, **SIZES)
    refusal(path, r"does not know; got: blk\.0\.ssm_conv\.weight")


def test_one_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refusal(path, r"one part of a model in several files; got: split\.count 2; do: join them")


def retyped(whole: bytes, tensor: str, *, kind: int | None = None, width: int | None = None) -> bytes:
    """A file whose matrix `tensor` claims another type or row length."""
    at = whole.index(tensor.encode()) + len(tensor) + 4
    found_width, height, found_kind = struct.unpack_from("<QQI", whole, at)
    values = (width or found_width, height, found_kind if kind is None else kind)
    return whole[:at] + struct.pack("<QQI", *values) + whole[at + 20 :]


CONTRADICTIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut_short": (lambda whole: whole[:-1000], r"tensor \S+ ends at byte \d+ of \d+; do: fetch the file again"),
    "rows_beyond_the_file": (
        lambda whole: retyped(whole, "token_embd.weight", width=1 << 40),
        r"tensor token_embd\.weight ends at byte \d+",
    ),
    "unknown_type": (
        lambda whole: retyped(whole, "blk.0.ffn_up.weight", kind=999),
        r"tensor blk\.0\.ffn_up\.weight has the unknown type 999",
    ),
    "row_of_no_whole_blocks": (
        lambda whole: retyped(whole, "blk.0.ffn_up.weight", width=50),
        r"tensor blk\.0\.ffn_up\.weight has the shape \[96, 50\]; allowed: rows of Q8_0 blocks of 32 weights",
    ),
    "row_of_no_whole_super_blocks": (
        lambda whole: retyped(whole, "blk.0.ffn_up.weight", kind=int(Kind.Q4_K)),
        r"tensor blk\.0\.ffn_up\.weight has the shape \[96, 64\]; allowed: rows of Q4_K blocks of 256 weights",
    ),
    "the_same_tensor_twice": (
        lambda whole: whole.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
        r"tensor blk\.1\.ffn_up\.weight is there twice",
    ),
    "another_version": (lambda whole: whole[:4] + b"\x01" + whole[5:], "version is 1; allowed: versions 2 and 3"),
    "ends_in_a_key": (lambda whole: whole[:40], "ends inside the name of a metadata key|ends inside metadata key"),
    "dimensions_of_another_width": (
        lambda whole: retyped(whole, "blk.0.ffn_up.weight", width=32),
        r"model\.layers\.0\.mlp\.up_proj\.weight does not hold Q8_0 blocks of a 96 x 64 matrix",
    ),
}


@pytest.mark.parametrize(("damage", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_gguf_file_that_contradicts_itself_is_refused_by_the_tensors_name(
    damage: Callable[[bytes], bytes], message: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(whole))
    refusal(path, message)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "magic_only": lambda whole: whole[:4],
    "header_only": lambda whole: whole[:24],
    "in_the_metadata": lambda whole: whole[:300],
    "in_the_tokens": lambda whole: whole[:3000],
    "in_the_tensors": lambda whole: whole[:-1000],
    "no_tensor_data": lambda whole: whole[: whole.index(b"output_norm.weight") + 18],
    "text": lambda whole: b"<!DOCTYPE html>" * 100,
    "safetensors": lambda whole: b"\x40\0\0\0\0\0\0\0{" + b" " * 200,
    "billions_of_keys": lambda whole: whole[:16] + b"\xff" * 7 + b"\0" + whole[24:],
    "billions_of_tensors": lambda whole: whole[:8] + b"\xff" * 7 + b"\0" + whole[16:],
}


@pytest.mark.filterwarnings("ignore")  # numpy warns of sizes that overflow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_gguf_file_is_refused(damage: Callable[[bytes], bytes], whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(whole))
    refusal(path, r"model\.gguf")


def test_a_llama_gguf_whose_heads_are_listed_per_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_head_count([4, 2])
    writer.add_tensor("token_embd.weight", np.ones((4, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refusal(path, r"llama\.attention\.head_count")


def test_partial_rotary_in_a_llama_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "rope.gguf", "llama", rope__dimension_count=8, **SIZES)
    refusal(path, "partial rotary embedding in a llama GGUF is not supported; got: 8")


ONES = np.ones((80, 64), dtype=np.float32)
REFUSED: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "falcon_with_biases": ("falcon", {}, ["blk.0.attn_qkv.bias"], "this kind of falcon.*4 key-value heads.*biases"),
    "falcon_of_several_heads_under_one_norm": ("falcon", {}, ["blk.0.attn_norm.weight"], "4 key-value heads, one norm"),
    "falcon_of_one_head_under_two_norms": (
        "falcon",
        {"attention__head_count_kv": 1},
        ["blk.0.attn_norm_2.weight"],
        "1 key-value heads, two norms",
    ),
    "starcoder_of_several_heads": (
        "starcoder",
        {},
        ["blk.0.attn_qkv.weight"],
        "attn_qkv.weight of 80 rows; allowed: 96",
    ),
    "olmo3": ("olmo2", {"attention__sliding_window": 64}, [], r"OLMo 3.*attention\.sliding_window 64"),
    "qwen2_of_wide_heads": (
        "qwen2",
        {"attention__key_length": 32},
        [],
        "do not share the hidden size; got: key_length 32",
    ),
    "gemma3_with_listed_windows": (
        "gemma3",
        {"attention__sliding_window": 64, "attention__sliding_window_pattern": 0},
        [],
        r"gemma3\.attention\.sliding_window_pattern.*positive integer",
    ),
}


@pytest.mark.parametrize(("architecture", "keys", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_gguf_file_cannot_say_for_certain_is_refused_by_name(
    architecture: str, keys: dict[str, Any], tensors: list[str], message: str, tmp_path: Path
) -> None:
    held = {"token_embd.weight": ONES, **dict.fromkeys(tensors, ONES)}
    refusal(write(tmp_path / "m.gguf", architecture, tensors=held, **{**SIZES, **keys}), message)


def test_a_gguf_file_of_no_heads_is_refused(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m.gguf", "llama", attention__head_count=0, embedding_length=64), "head_count")
