"""Random adapters are what PEFT would have saved."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import ConfigurationError
from graftlm.models.read import read_sites
from graftlm.workload import write_random_adapter
from tests.tiny import make_llama, make_model

TOKENS = [5, 80, 3, 200, 17, 42]
SMALL = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BASES = {
    "llama": lambda folder: make_llama(folder),
    "gpt2": lambda folder: make_model(
        folder, GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    ),
    "falcon": lambda folder: make_model(folder, FalconConfig(**SMALL, new_decoder_architecture=False)),
}


@pytest.mark.parametrize("family", BASES)
def test_peft_loads_every_tensor_and_agrees(family: str, tmp_path: Path) -> None:
    base = BASES[family](tmp_path / "base")
    folder = write_random_adapter(tmp_path / "adapter", read_sites(open_checkpoint(base)), rank=3, seed=7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = model(torch.tensor([TOKENS])).logits[0]
    adapted = peft.PeftModel.from_pretrained(model, str(folder))
    report = peft.utils.save_and_load.set_peft_model_state_dict(
        adapted, peft.utils.save_and_load.load_peft_weights(str(folder))
    )
    assert not report.unexpected_keys
    assert not [key for key in report.missing_keys if "lora_" in key]
    loras = {name: tensor for name, tensor in adapted.named_parameters() if "lora_" in name}
    assert loras
    assert all(bool(tensor.any()) for tensor in loras.values())
    # What PEFT adapts when it is asked for all of them.
    everywhere = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(r=3, target_modules="all-linear", fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM"),
    )
    assert loras.keys() == {name for name, _ in everywhere.named_parameters() if "lora_" in name}
    expected = adapted(torch.tensor([TOKENS])).logits[0]
    assert (expected - plain).abs().max() > 1e-2
    llm = LLM(base, adapters={"random": folder}, kv_cache_bytes=4 << 20)
    got = llm.logits(TOKENS, adapter="random")
    llm.shutdown()
    assert (got - expected).abs().max() <= 1e-4 * (1 + expected.abs().max())


def test_seeds_are_adapters_of_their_own(llama: Path, tmp_path: Path) -> None:
    sites = read_sites(open_checkpoint(llama))
    files = [
        write_random_adapter(tmp_path / name, sites, rank=2, seed=seed) / "adapter_model.safetensors"
        for name, seed in (("a", 0), ("b", 1), ("c", 0))
    ]
    first, other, again = (file.read_bytes() for file in files)
    assert first == again != other


def test_a_rank_below_one_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="rank must be a positive integer; got: 0"):
        write_random_adapter(tmp_path / "none", read_sites(open_checkpoint(llama)), rank=0, seed=0)
    assert not (tmp_path / "none").exists()
