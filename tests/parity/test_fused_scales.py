"""Eight-bit floats with a scale for each of the matrices that a checkpoint has fused into one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Phi3Config

from graftlm import LLM
from graftlm.errors import CheckpointError
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter, prompt_of
from tests.parity.quantized_bases import with_matrices
from tests.tiny import edit_json, make_model, write_tokenizer

PROMPT = prompt_of(20, 1)
# Rows of query, key and value; of gate and up.
SHARDS = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96)}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        }
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Phi3Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.12,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    return make_model(tmp_path_factory.mktemp("phi3"), config)


def quantise(base: Path, folder: Path, config: dict[str, object], *, num_missing: int = 0) -> tuple[Path, Path]:
    """A folder in FP8, and one of the same values in float32. num_missing: scales that are left out of each module."""
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        path, module = name.removesuffix(".weight"), name.split(".")[-2]
        if module not in SHARDS:
            stored[name] = tensor.clone()
            continue
        shards = tensor.split(SHARDS[module])
        # So unlike one another that any other scale would show.
        scales = torch.stack([shard.abs().max() / 448 * 4**index for index, shard in enumerate(shards)])
        codes = torch.cat(
            [(shard / scale).to(torch.float8_e4m3fn) for shard, scale in zip(shards, scales, strict=True)]
        )
        stored |= {f"{path}.weight": codes, f"{path}.weight_scale": scales[num_missing:].clone()}
        sizes = torch.tensor(SHARDS[module])
        exact[name] = codes.float() * scales.repeat_interleave(sizes).unsqueeze(1)
    (folder / "quantized").mkdir()
    save_file(stored, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    (folder / "quantized" / "config.json").write_text((base / "config.json").read_text())
    edit_json(folder / "quantized" / "config.json", quantization_config=config)
    write_tokenizer(folder / "quantized")
    return folder / "quantized", with_matrices(base, folder / "exact", exact)


@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_each_shard_of_a_fused_module_has_its_scale(config: dict[str, object], base: Path, tmp_path: Path) -> None:
    quantized, exact = quantise(base, tmp_path, config)
    adapter = make_even_adapter(exact, tmp_path / "adapter", target_modules=["qkv_proj", "gate_up_proj"])
    llm = LLM(quantized, kv_cache_bytes=1 << 20, adapters={"a": adapter})
    assert_close(llm.logits(PROMPT), Oracle(exact).logits(PROMPT))
    assert_close(llm.logits(PROMPT, adapter="a"), Oracle(exact).logits(PROMPT, adapter))
    assert (llm.logits(PROMPT, adapter="a") - llm.logits(PROMPT)).abs().max() > LOUD


def test_another_number_of_scales_is_refused(base: Path, tmp_path: Path) -> None:
    quantized, _ = quantise(base, tmp_path, FP8, num_missing=1)
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight_scale .*\[3\] for fused parts of 64, 32, 32 rows"):
        LLM(quantized, kv_cache_bytes=1 << 20)
