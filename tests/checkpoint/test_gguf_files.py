"""GGUF files that are damaged, foreign or incomplete."""

from __future__ import annotations

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


def refusal(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        LLM(path, kv_cache_bytes=1 << 20)
    assert type(caught.value) is CheckpointError


def write(path: Path, architecture: str, *, tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """A small GGUF file with any metadata."""
    writer = gguf.GGUFWriter(path, architecture)
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
    refusal(write(tmp_path / "m.gguf", "mamba"), "cannot read from GGUF; got: mamba; allowed: llama")


def test_a_gguf_file_that_lacks_metadata_is_refused_by_the_keys_name(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m.gguf", "llama"), r"lacks a metadata key; got: llama\.attention\.head_count")


def test_a_gguf_file_with_unknown_tensors_is_refused_by_their_names(tmp_path: Path) -> None:
    tensors = {"blk.0.ssm_conv.weight": np.ones((4, 32), dtype=np.float32)}
    refusal(write(tmp_path / "m.gguf", "llama", tensors=tensors), r"does not know; got: blk\.0\.ssm_conv\.weight")


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


def test_a_mixture_of_experts_and_partial_rotary_in_gguf_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"attention__head_count": 4, "embedding_length": 64}
    refusal(write(tmp_path / "moe.gguf", "llama", expert_count=8, **sizes), "mixture-of-experts.*expert_count")
    refusal(write(tmp_path / "rope.gguf", "llama", rope__dimension_count=8, **sizes), "partial rotary")


def test_a_gguf_file_of_no_heads_is_refused(tmp_path: Path) -> None:
    refusal(write(tmp_path / "m.gguf", "llama", attention__head_count=0, embedding_length=64), "head_count")
