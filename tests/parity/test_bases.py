"""Every shape a Llama checkpoint comes in, base and adapters, against transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.parity.oracle import LOUD, Oracle, make_even_adapter, make_world, prompt_of
from tests.tiny import ALL_PROJECTIONS, edit_json, make_llama

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,  # puts a wavelength of 24 between the two bounds, 8 and 32, where the rule blends
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped_query": {},
    "tied": {"tied": True},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "every_bias_and_tied": {"attention_bias": True, "mlp_bias": True, "tied": True},
    "wide_heads": {"head_dim": 32},
    "odd_sizes": {"hidden_size": 60, "intermediate_size": 77, "num_attention_heads": 6, "num_key_value_heads": 3},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": LINEAR_ROPE},
    "yarn_rope": {"rope_parameters": YARN_ROPE},
    "large_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "small_norm_eps": {"rms_norm_eps": 1e-2},
    "one_layer": {"num_hidden_layers": 1},
}


def shake(folder: Path) -> Path:
    """Give norms and biases random values: transformers starts them at one and zero, where mistakes do not show."""
    torch.manual_seed(7)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = tensor + 0.3 * torch.randn_like(tensor)
        elif name.endswith(".bias"):
            tensors[name] = 0.3 * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapters_for(base: Path, folder: Path) -> dict[str, Path]:
    return {
        "attention": make_even_adapter(base, folder / "attention", seed=1, target_modules=["q_proj", "v_proj"]),
        "everything": make_even_adapter(
            base, folder / "everything", seed=2, r=5, use_rslora=True, target_modules=[*ALL_PROJECTIONS, "lm_head"]
        ),
        "mlp": make_even_adapter(
            base, folder / "mlp", seed=3, r=16, lora_alpha=8, target_modules=["up_proj", "down_proj"]
        ),
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_llama_config_serves_base_and_adapters_as_peft_does(config: dict[str, Any], tmp_path: Path) -> None:
    base = shake(make_llama(tmp_path / "base", **config))
    make_world(base).assert_parity(adapters_for(base, tmp_path))


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, LINEAR_ROPE, YARN_ROPE], ids=["llama3", "linear", "yarn"])
def test_rope_scaling_changes_these_logits_so_that_parity_proves_something(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    scaled = make_llama(tmp_path / "scaled", rope_parameters=rope)
    plain = make_llama(tmp_path / "plain")
    prompt = prompt_of(64, 2)
    assert (Oracle(scaled).logits(prompt) - Oracle(plain).logits(prompt)).abs().max() > LOUD


def to_v4_spelling(folder: Path, scaling: dict[str, Any] | None) -> None:
    edit_json(
        folder / "config.json",
        rope_parameters=...,
        dtype=...,
        rope_theta=50_000.0,
        rope_scaling=scaling,
        torch_dtype="float32",
        pretraining_tp=1,
        transformers_version="4.40.0",
    )


V4_SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear_with_type": {"type": "linear", "factor": 4.0},
    "yarn_with_type": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "finetuned": True},
    "llama3": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
}


@pytest.mark.parametrize("scaling", V4_SCALINGS.values(), ids=V4_SCALINGS)
def test_a_config_in_v4_spelling_means_the_same(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    to_v4_spelling(base, scaling)
    make_world(base).assert_parity(adapters_for(base, tmp_path))


def write_sharded(folder: Path) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="60KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def write_head_copy(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"}
    )


def write_other_head(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.manual_seed(9)
    tensors = load_file(path)
    head = 0.12 * torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})


def write_old_rotary_buffers(folder: Path) -> None:
    path = folder / "model.safetensors"
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file({**load_file(path), **buffers}, path, metadata={"format": "pt"})


LAYOUTS: dict[str, tuple[bool, Callable[[Path], None]]] = {
    "sharded": (False, write_sharded),
    "sharded_and_tied": (True, write_sharded),
    "tied_with_an_equal_head": (True, write_head_copy),
    "tied_with_another_head": (True, write_other_head),
    "old_rotary_buffers": (False, write_old_rotary_buffers),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of the second head
@pytest.mark.parametrize(("tied", "write"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_of_the_weight_files_is_read_as_transformers_reads_it(
    tied: bool, write: Callable[[Path], None], tmp_path: Path
) -> None:
    base = make_llama(tmp_path / "base", tied=tied)
    adapters = adapters_for(base, tmp_path)
    write(base)
    make_world(base).assert_parity(adapters)


def test_where_both_a_single_file_and_shards_lie_the_single_file_counts_as_in_transformers(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", seed=0)
    adapters = adapters_for(base, tmp_path)
    stale = make_llama(tmp_path / "stale", seed=1)
    LlamaForCausalLM.from_pretrained(stale).save_pretrained(stale, max_shard_size="60KB")
    (stale / "model.safetensors").unlink()
    for file in [*stale.glob("model-*.safetensors"), stale / "model.safetensors.index.json"]:
        file.rename(base / file.name)
    make_world(base).assert_parity(adapters)


def test_the_chosen_dtype_is_the_checkpoints_own_whatever_spelling_config_json_uses(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    assert json.loads((base / "config.json").read_text())["dtype"] == "float32"
    to_v4_spelling(base, None)
    prompt = prompt_of(16, 3)
    assert (make_world(base).llm.logits(prompt) - Oracle(base).logits(prompt)).abs().max() < 1e-4
