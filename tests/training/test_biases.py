"""Biases that are trained beside the low-rank updates: PEFT's `bias` and `lora_bias`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from graftlm import LLM
from graftlm.errors import AdapterUnsupported, ConfigurationError
from graftlm.training import train
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import LOUD, Oracle, assert_close
from tests.tiny import make_adapter, make_model
from tests.training.peft_loop import completion_rows, write_rows
from tests.training.test_gradients import assert_gradients_of_peft

# PEFT's, of a bias that merging has no place for, and of one that looks like a part of a matrix.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. .* LoRA tensor.* invalid shape"),
]
# A family -> which biases, and what else is trained.
CASES: dict[str, dict[str, Any]] = {
    "llama_biases": {"bias": "lora_only"},
    "gpt2": {"bias": "all", "lora_bias": True},
    "gpt_neox": {"bias": "all", "use_dora": True},
    "phi": {"bias": "all"},
    "llama": {"lora_bias": True},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("family", CASES)
def test_gradients_of_biases_are_those_of_peft(tmp_path: Path, family: str) -> None:
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", case.config(), dtype=torch.float64)
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, target_modules=[*case.targets], **CASES[family])
    assert_gradients_of_peft(base, adapter, tolerance=1e-8)


def test_a_trained_lora_bias_has_the_same_logits_in_peft_and_in_graft(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows(["the cat sat on the mat", "ok"]))
    out, targets = tmp_path / "out", "q_proj,down_proj,lm_head"
    train(llama, data=data, output=out, steps=6, lr=2e-2, target_modules=targets, lora_bias=True, dropout=0.1)
    tensors = safetensors.torch.load_file(out / "adapter_model.safetensors")
    biases = [tensor for name, tensor in tensors.items() if name.endswith("lora_B.bias")]
    assert len(biases) == len(tensors) // 3
    assert all(bias.abs().max() > 0 for bias in biases)
    ids = list(range(60, 80))
    oracle = Oracle(llama)
    expected = oracle.logits(ids, out)
    llm = LLM(llama, adapters={"trained": out}, kv_cache_bytes=1 << 20)
    assert_close(llm.logits(ids, adapter="trained"), expected)
    llm.shutdown()
    assert (expected - oracle.logits(ids)).abs().max() > LOUD


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"dora": True}, "dora"),
        ({"target_modules": "q_proj,embed_tokens"}, "target_modules=model.embed_tokens"),
    ],
)
def test_a_lora_bias_beside_what_peft_refuses_is_refused(
    llama: Path, tmp_path: Path, settings: dict[str, Any], got: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    with pytest.raises(AdapterUnsupported, match=f"lora_bias does not go with.*; got: {got};"):
        train(llama, data=data, output=tmp_path / "out", steps=1, lora_bias=True, **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_have_the_same_logits_in_peft_and_in_graft(tmp_path: Path, bias: str) -> None:
    base = make_model(tmp_path / "base", FAMILY_CASES["opt"].config())
    data = write_rows(tmp_path / "rows.jsonl", completion_rows(["the cat sat on the mat", "ok"]))
    out, norm = tmp_path / "out", "final_layer_norm"
    train(base, data=data, output=out, steps=6, lr=2e-2, target_modules="q_proj,fc2", bias=bias, modules_to_save=norm)
    assert json.loads((out / "adapter_config.json").read_text())["bias"] == bias
    names = {name for name in safetensors.torch.load_file(out / "adapter_model.safetensors") if name.endswith("bias")}
    assert len([name for name in names if "layer_norm" in name]) == (3 if bias == "lora_only" else 5)
    ids = list(range(60, 80))
    oracle = Oracle(base)
    expected = oracle.logits(ids, out)
    llm = LLM(base, adapters={"trained": out}, kv_cache_bytes=1 << 20)
    assert_close(llm.logits(ids, adapter="trained"), expected)
    llm.shutdown()
    assert (expected - oracle.logits(ids)).abs().max() > LOUD


def test_biases_of_a_base_without_any_are_refused(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    for bias in ("all", "lora_only"):
        with pytest.raises(ConfigurationError, match=f"no module that bias asks for has one; got: {bias}"):
            train(llama, data=data, output=tmp_path / "out", steps=1, bias=bias)
    with pytest.raises(ConfigurationError, match="bias has an unknown value; got: some; allowed: none, lora_only, all"):
        train(llama, data=data, output=tmp_path / "out", steps=1, bias="some")
    assert not (tmp_path / "out").exists()
