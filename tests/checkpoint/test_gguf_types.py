"""Every type a GGUF file can store a matrix in, read in full and kept as it is."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from graftlm.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graftlm.errors import CheckpointError
from graftlm.quantization.gguf import read_gguf_format
from graftlm.quantization.gguf_blocks import BLOCK_TYPES
from tests.parity.gguf_writer import unpermute

Kind = gguf.GGMLQuantizationType
NUM_HEADS, HIDDEN = 4, 256
QUERY = "model.layers.0.self_attn.q_proj"
# The gguf package knows their size only.
UNREADABLE = ["I8", "Q8_1", "Q8_K"]
BLOCKS = [kind.name for kind in Kind if gguf.GGML_QUANT_SIZES[kind][0] > 1 and kind.name not in (*UNREADABLE, "Q1_0")]
DEQUANTISED = sorted(set(BLOCKS) - set(BLOCK_TYPES))
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_query(path: Path, kind: gguf.GGMLQuantizationType, data: np.ndarray) -> Path:
    """A llama file whose first query projection holds `data`, rows of bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_bytes(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of random blocks; whatever numbers they hold are compared as bits."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    # No byte above 0x77: no float16 among them is infinite or no number.
    return generator.integers(0, 0x78, (HIDDEN, HIDDEN // weights * num_bytes), dtype=np.uint8)


def expected(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(unpermute(dequantize(data, kind), NUM_HEADS)))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_query_rows_come_back_in_order_without_leaving_their_blocks(name: str, tmp_path: Path) -> None:
    data = random_bytes(Kind[name])
    checkpoint = GGUFCheckpoint(write_query(tmp_path / "m.gguf", Kind[name], data))
    assert checkpoint.quantization_config == {"quant_method": "gguf", "block_types": {f"{QUERY}.weight": name}}
    assert torch.equal(checkpoint.read(f"{QUERY}.weight"), expected(data, Kind[name]))
    weight = read_gguf_format(checkpoint.quantization_config).read(
        checkpoint, QUERY, shape=(HIDDEN, HIDDEN), dtype=torch.float32, device=torch.device("cpu")
    )
    checkpoint.close()
    assert weight.num_bytes == data.nbytes
    assert torch.equal(weight.dequantize(), expected(data, Kind[name]))


@pytest.mark.parametrize("name", DEQUANTISED)
def test_other_block_types_are_read_in_full_and_named_in_the_log(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = random_bytes(Kind[name])
    checkpoint = GGUFCheckpoint(write_query(tmp_path / "m.gguf", Kind[name], data))
    assert checkpoint.quantization_config is not None
    with caplog.at_level(logging.WARNING):
        weight_format = read_gguf_format(checkpoint.quantization_config)
    assert caplog.messages == [f"GGUF matrices dequantised in memory: 1 of type {name}"]
    assert not weight_format.stores(checkpoint, QUERY)
    torch.testing.assert_close(
        checkpoint.read(f"{QUERY}.weight"), expected(data, Kind[name]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_are_stored_in_their_dtype_and_read_as_float32(name: str, tmp_path: Path) -> None:
    matrix = torch.randn(HIDDEN, HIDDEN).to(PLAIN[name])
    data = matrix.view(torch.uint8).numpy()
    checkpoint = GGUFCheckpoint(write_query(tmp_path / "m.gguf", Kind[name], data))
    in_order = torch.from_numpy(unpermute(matrix.float().numpy(), NUM_HEADS).copy())
    assert checkpoint.quantization_config is None
    assert checkpoint.read_stored(f"{QUERY}.weight").dtype == PLAIN[name]
    assert torch.equal(checkpoint.read_stored(f"{QUERY}.weight").float(), in_order)
    assert torch.equal(checkpoint.read(f"{QUERY}.weight"), in_order)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_type_that_nothing_can_dequantise_is_refused_by_the_tensors_name(name: str, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_query(tmp_path / "m.gguf", Kind[name], random_bytes(Kind[name])))
    with pytest.raises(CheckpointError, match=rf"tensor blk\.0\.attn_q\.weight has a type .*; got: {name}"):
        checkpoint.read(f"{QUERY}.weight")
