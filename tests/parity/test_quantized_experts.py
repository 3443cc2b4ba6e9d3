"""Experts that are stored quantised, in GGUF files and in MXFP4: as their dequantised values, adapters included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graftlm import LLM
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.errors import CheckpointError
from graftlm.models.inspect import inspect_checkpoint
from tests.checkpoint.gguf_converter import FAMILIES, convert, make_model
from tests.parity.family_cases import FAMILY_CASES, GPT_OSS_PARAMETERS, MOE_PARAMETERS
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter
from tests.tiny import edit_json
from tests.tiny import make_model as make_folder

PROMPT = torch.randint(4, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def assert_parity(llm: LLM, exact: Path, folder: Path, parameters: tuple[str, ...]) -> None:
    """Of the base, and of adapters on attention and on the experts as PEFT's parameters."""
    oracle = Oracle(exact)
    base = oracle.logits(PROMPT)
    assert_close(llm.logits(PROMPT), base)
    targets = {"attention": ["q_proj", "o_proj"], "experts": []}
    for name, modules in targets.items():
        adapter = make_even_adapter(
            exact,
            folder / name,
            target_modules=modules,
            **({} if modules else {"target_parameters": list(parameters)}),
        )
        expected = oracle.logits(PROMPT, adapter)
        assert (expected - base).abs().max() > LOUD
        llm.load_adapter(name, adapter)
        assert_close(llm.logits(PROMPT, adapter=name), expected)


@pytest.mark.parametrize(
    ("name", "kind"), [("mixtral", "Q8_0"), ("qwen2moe", "Q8_0"), ("qwen3moe", "Q4_1"), ("gpt_oss", "MXFP4")]
)
def test_experts_of_a_gguf_file_stay_quantised_and_take_adapters(name: str, kind: str, tmp_path: Path) -> None:
    exact = tmp_path / "exact"
    make_model(FAMILIES[name], exact)
    weights = load_file(exact / "model.safetensors")
    # Quiet enough for float32 to tell no two implementations apart.
    save_file({key: value * 0.25 for key, value in weights.items()}, exact / "model.safetensors", {"format": "pt"})
    path = convert(FAMILIES[name], exact, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(path)
    dequantized = {key: read(checkpoint, key) for key in weights}
    save_file(dequantized, exact / "model.safetensors", {"format": "pt"})
    matrices = inspect_checkpoint(checkpoint).matrices
    assert {matrix.format for matrix in matrices if "experts" in matrix.path} == {kind}
    parameters = GPT_OSS_PARAMETERS if name == "gpt_oss" else MOE_PARAMETERS
    assert_parity(LLM(path, kv_cache_bytes=1 << 20), exact, tmp_path, parameters)


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor, or the experts' that make it up."""
    if name in checkpoint.tensor_names():
        return checkpoint.read(name).contiguous()
    count = sum(stored.startswith(f"{name}.") for stored in checkpoint.tensor_names())
    return torch.stack([checkpoint.read(f"{name}.{expert}.weight") for expert in range(count)])


def write_mxfp4(exact: Path, folder: Path) -> Path:
    """A GPT-OSS model with random experts in MXFP4, as OpenAI publishes them; afterwards `exact` holds their values."""
    shutil.copytree(exact, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(exact / "model.safetensors")
    values, stored = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 123, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(values, exact / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    config = FAMILY_CASES["gpt_oss"].config()
    config.intermediate_size = 96
    return make_folder(tmp_path / "exact", config)


def test_gpt_oss_in_mxfp4_stays_quantised_and_takes_adapters(gpt_oss: Path, tmp_path: Path) -> None:
    folder = write_mxfp4(gpt_oss, tmp_path / "mxfp4")
    report = inspect_checkpoint(open_checkpoint(folder))
    experts = [matrix for matrix in report.matrices if "experts" in matrix.path]
    assert {matrix.format for matrix in experts} == {"float4_e2m1, groups of 32"}
    num_weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in experts)
    # 17 bytes for 32 weights, and a scale of one.
    assert sum(matrix.num_bytes for matrix in experts) == num_weights // 32 * 17 + 4 * len(experts)
    assert_parity(LLM(folder, kv_cache_bytes=1 << 20), gpt_oss, tmp_path, GPT_OSS_PARAMETERS)


def test_gpt_oss_in_mxfp4_can_be_dequantised_while_loading(gpt_oss: Path, tmp_path: Path) -> None:
    folder = write_mxfp4(gpt_oss, tmp_path / "mxfp4")
    llm = LLM(folder, quantization="none", kv_cache_bytes=1 << 20)
    assert_close(llm.logits(PROMPT), Oracle(gpt_oss).logits(PROMPT))


def wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], dim=1)


BAD = {
    "scales_missing": ("model.layers.0.mlp.experts.down_proj_scales", lambda tensor: None, "is missing"),
    "scales_misshapen": ("model.layers.0.mlp.experts.down_proj_scales", wider, "has the wrong shape"),
    "blocks_misshapen": ("model.layers.1.mlp.experts.gate_up_proj_blocks", wider, "has the wrong shape"),
    "an_expert_too_few": ("model.layers.1.mlp.experts.gate_up_proj_blocks", lambda tensor: tensor[1:], "wrong shape"),
    "scales_of_another_dtype": ("model.layers.0.mlp.experts.down_proj_scales", Tensor.float, "has the wrong dtype"),
}


@pytest.mark.parametrize(("name", "change", "message"), BAD.values(), ids=BAD)
def test_damaged_mxfp4_is_refused_by_the_tensors_name(
    name: str, change: object, message: str, gpt_oss: Path, tmp_path: Path
) -> None:
    folder = write_mxfp4(gpt_oss, tmp_path / "mxfp4")
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name)) if callable(change) else None
    save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as refused:
        LLM(folder, kv_cache_bytes=1 << 20)
    assert name in str(refused.value)


def test_mxfp4_tensors_without_a_config_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    folder = write_mxfp4(gpt_oss, tmp_path / "mxfp4")
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj; unknown: .*gate_up_proj_blocks"):
        LLM(folder, kv_cache_bytes=1 << 20)
