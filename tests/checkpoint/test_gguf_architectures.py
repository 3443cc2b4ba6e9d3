"""llama.cpp's architectures, converted and read back: transformers' own tensors and config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from graftlm.checkpoint import open_checkpoint
from graftlm.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graftlm.quantization.gguf import read_gguf_format
from tests.checkpoint.gguf_converter import FAMILIES, Family, Kind, convert, make_model

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
# transformers reads these from GGUF too. Not its falcon with several key-value heads, whose rows it leaves moved, and
# not phi3's factors, which it drops.
TRANSFORMERS_READS = ["llama", "qwen2", "qwen2_tied", "qwen3", "gemma2", "gemma3", "gpt2", "phi3", "falcon_7b", "bloom"]
# What a GGUF file cannot hold, or what does not change the arithmetic.
UNSTORED_KEYS = ("architectures", "dtype", "transformers_version", "_name_or_path", "use_cache", "initializer_range")


def stored_config(config: Any) -> dict[str, Any]:
    values = config.to_dict()
    if values["model_type"] == "falcon" and not values["new_decoder_architecture"]:
        # Not read where there is one key-value head, and saved as if there were many.
        values["num_kv_heads"] = values["num_ln_in_parallel_attn"] = None
    if values["model_type"] in ("gpt2", "gpt_bigcode"):
        values["n_inner"] = values["n_inner"] or 4 * values["n_embd"]
    return {key: value for key, value in values.items() if key not in UNSTORED_KEYS}


@EVERY
def test_a_converted_model_has_the_tensors_it_was_converted_from(family: Family, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(convert(family, tmp_path, tmp_path / "model.gguf"))
    assert checkpoint.tensor_names() == original.keys()
    assert checkpoint.quantization_config is None
    for name, tensor in original.items():
        assert checkpoint.shape(name) == tensor.shape
        # One added to a norm and taken away again rounds.
        tolerance = 1e-6 if "gemma" in family.model_type and name.endswith("norm.weight") else 0.0
        torch.testing.assert_close(checkpoint.read(name), tensor, rtol=0, atol=tolerance)


@EVERY
def test_a_converted_model_has_the_config_it_was_converted_from(family: Family, tmp_path: Path) -> None:
    original = make_model(family, tmp_path)
    checkpoint = open_checkpoint(convert(family, tmp_path, tmp_path / "model.gguf"))
    keys = dict(checkpoint.config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    assert stored_config(config) == stored_config(original)
    # Nothing is left over that transformers would not write.
    assert keys.keys() <= original.to_dict().keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS_READS)
def test_a_converted_model_is_the_one_transformers_reads_from_the_same_file(name: str, tmp_path: Path) -> None:
    make_model(FAMILIES[name], tmp_path / "folder")
    path = convert(FAMILIES[name], tmp_path / "folder", tmp_path / "model.gguf", Kind.Q8_0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    theirs = model.state_dict()
    checkpoint = open_checkpoint(path)
    assert theirs.keys() - checkpoint.tensor_names() <= {"lm_head.weight"}
    for tensor in checkpoint.tensor_names():
        assert torch.equal(checkpoint.read(tensor), theirs[tensor]), tensor


@EVERY
def test_a_matrix_kept_quantised_is_the_one_that_is_read_in_full(family: Family, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    checkpoint = GGUFCheckpoint(convert(family, tmp_path, tmp_path / "model.gguf", Kind.Q8_0))
    assert checkpoint.quantization_config is not None
    weight_format = read_gguf_format(checkpoint.quantization_config)
    matrices = {
        name for name in checkpoint.tensor_names() if name.endswith("weight") and len(checkpoint.shape(name)) == 2
    }
    assert checkpoint.quantization_config["block_types"] == dict.fromkeys(matrices, "Q8_0")
    for name in matrices:
        expected = checkpoint.read(name)
        if (family.model_type == "gpt2" and ".h." in name) or (family.model_type == "gpt_oss" and "experts" in name):
            expected = expected.T
        rows, columns = expected.shape
        weight = weight_format.read(
            checkpoint,
            name.removesuffix(".weight"),
            shape=(rows, columns),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        assert weight.num_bytes == rows * columns // 32 * 34
        assert torch.equal(weight.dequantize(), expected)
