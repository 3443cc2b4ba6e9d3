"""Families as older releases wrote them, and what their configs are refused for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm import LLM
from graftlm.errors import CheckpointError
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import Oracle, assert_close, prompt_of
from tests.tiny import edit_json, make_model

PROMPT = prompt_of(40, 3)


def make_base(name: str, folder: Path) -> Path:
    return make_model(folder / name, FAMILY_CASES[name].config())


def rewrite(base: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    weights = base / "model.safetensors"
    save_file(change(load_file(weights)), weights, metadata={"format": "pt"})


def assert_is_transformers(base: Path, expected: Tensor) -> None:
    assert_close(LLM(base).logits(PROMPT), expected)


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = {}
    for layer in ("gpt_neox.layers.0", "gpt_neox.layers.1"):
        buffers[f"{layer}.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
        buffers[f"{layer}.attention.masked_bias"] = torch.tensor(-1e9)
        buffers[f"{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)
    return {**tensors, **buffers}


def with_llama_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(12) for layer in range(2)}
    return {**tensors, **buffers}


ROPE = FAMILY_CASES["phi3_longrope"].settings["rope_parameters"]
SHORT_FACTORS, LONG_FACTORS = ROPE["short_factor"], ROPE["long_factor"]
# name -> case of the family, changes of config.json (... deletes), change of the tensors.
OLD_FILES: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "bloom_of_the_hub": (
        "bloom",
        {
            "hidden_size": ...,
            "n_embed": 64,
            "n_head": ...,
            "num_attention_heads": 4,
            "seq_length": 512,
            "tie_word_embeddings": ...,
            "skip_bias_add": True,
            "masked_softmax_fusion": True,
            "attention_softmax_in_fp32": True,
            "pretraining_tp": 4,
        },
        without_prefix,
    ),
    "falcon_without_prefix": ("falcon_40b", {"num_ln_in_parallel_attn": ...}, without_prefix),
    "falcon_7b_of_version_4": ("falcon_7b", {"num_kv_heads": ..., "rope_parameters": ..., "rope_theta": 10000.0}, dict),
    "falcon_rw_of_version_4": (
        "falcon_rw",
        {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None},
        dict,
    ),
    "pythia_of_version_4": (
        "gpt_neox",
        {"rope_parameters": ..., "rotary_pct": 0.25, "rotary_emb_base": 10000, "attention_bias": ...},
        with_buffers,
    ),
    "phi_2_of_version_4": (
        "phi_2",
        {
            "rope_parameters": ...,
            "partial_rotary_factor": 0.375,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "num_key_value_heads": None,
        },
        dict,
    ),
    "mistral_of_version_4": (
        "mistral",
        {"rope_parameters": ..., "rope_theta": 10000.0, "torch_dtype": "float32", "dtype": ...},
        with_llama_buffers,
    ),
    "qwen2_of_version_4": (
        "qwen2_window",
        {"rope_parameters": ..., "rope_theta": 10000.0, "layer_types": ..., "use_mrope": False},
        dict,
    ),
    "qwen3_of_version_4": (
        "qwen3",
        {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None, "layer_types": ...},
        dict,
    ),
    "phi3_of_version_4": (
        "phi3_longrope",
        {
            "rope_parameters": ...,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        },
        dict,
    ),
    "phi4_mini_of_version_4": (
        "phi3_window_partial",
        {
            "rope_parameters": ...,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
        },
        dict,
    ),
    "olmo2_of_version_4": ("olmo2", {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None}, dict),
    "smollm3_of_the_hub": (
        "smollm3",
        {"rope_parameters": ..., "rope_theta": 2000000.0, "layer_types": ..., "max_window_layers": 28},
        dict,
    ),
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_an_older_file_is_read_as_what_it_was_saved_from(name: str, tmp_path: Path) -> None:
    family, config, change = OLD_FILES[name]
    base = make_base(family, tmp_path)
    expected = Oracle(base, attention=FAMILY_CASES[family].attention).logits(PROMPT)
    edit_json(base / "config.json", **config)
    rewrite(base, change)
    assert_is_transformers(base, expected)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bloom", "lm_head.weight"),
        ("falcon_7b", "lm_head.weight"),
        ("gpt_neox_sequential", "embed_out.weight"),
        ("phi_qk_norm", "lm_head.weight"),
        ("qwen2", "lm_head.weight"),
        ("smollm3_window", "lm_head.weight"),
    ],
)
def test_a_head_beside_a_tied_table_counts_if_it_differs(name: str, head: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path)
    tied = LLM(base).logits(PROMPT)
    end = f".{FAMILY_CASES[name].embedding}.weight"
    [table] = [key for key in load_file(base / "model.safetensors") if key.endswith(end)]
    rewrite(base, lambda tensors: {**tensors, head: tensors[table].clone()})
    assert torch.equal(LLM(base).logits(PROMPT), tied)
    rewrite(base, lambda tensors: {**tensors, head: tensors[table] + 0.3})
    untied = Oracle(base, attention=FAMILY_CASES[name].attention).logits(PROMPT)
    assert (untied - tied).abs().max() > 1e-2
    assert_is_transformers(base, untied)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bloom", {"n_head": 5}, "hidden_size is not a multiple of n_head"),
        ("bloom", {"num_attention_heads": 8}, "n_head=4, num_attention_heads=8"),
        ("bloom", {"n_embed": 128}, "n_embed=128, hidden_size=64"),
        ("bloom", {"n_head": 0}, "n_head is not a positive integer"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ("bloom", {"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ("falcon_40b", {"num_attention_heads": 7}, "hidden_size is not a multiple of num_attention_heads"),
        ("falcon_40b", {"num_kv_heads": 3}, "not a multiple of the number of key-value heads"),
        ("falcon_40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ("falcon_40b", {"parallel_attn": False}, "parallel_attn"),
        ("falcon_7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon_7b", {"activation": "mish"}, "activation is not supported"),
        ("falcon_rw", {"num_kv_heads": 2}, "num_kv_heads"),
        ("gpt_neox", {"num_attention_heads": 6}, "hidden_size is not a multiple of num_attention_heads"),
        ("gpt_neox", {"rope_parameters": {"rope_type": "spiral"}}, "rope type"),
        ("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.07}}, "rotary"),
        ("gpt_neox", {"hidden_act": "mish"}, "hidden_act is not supported"),
        ("phi", {"num_key_value_heads": 3}, "not a multiple of the number of key-value heads"),
        ("phi", {"qk_layernorm": "yes"}, "qk_layernorm is not true or false"),
        ("phi", {"model_type": "RefinedWebModel"}, "falcon"),
        ("mistral", {"num_attention_heads": 3, "head_dim": ...}, "hidden_size is not a multiple of num_attention"),
        ("mistral", {"sliding_window": 0}, "sliding_window is not a positive integer"),
        ("mistral_window", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not supported"),
        ("mistral", {"hidden_act": "mish"}, "hidden_act is not supported"),
        ("qwen2", {"num_key_value_heads": 3}, "not a multiple of the number of key-value heads"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is not supported.*2 of full_attention"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "there is no sliding window"),
        ("qwen2_window", {"max_window_layers": "1", "layer_types": ...}, "max_window_layers is not an integer"),
        ("qwen2", {"rope_parameters": {"rope_type": "spiral"}}, "rope type"),
        ("qwen3", {"attention_bias": "no"}, "attention_bias is not true or false"),
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads is not a positive integer"),
        ("phi3", {"attention_bias": True}, "attention_bias is not supported"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias is not supported"),
        (
            "phi3_longrope",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ("olmo2", {"clip_qkv_norm": 8.0}, "may change what the model computes; got: clip_qkv_norm"),
        ("olmo2", {"rms_norm_eps": -1}, "rms_norm_eps is not a positive number"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is not supported.*each of the 2 layers"),
        ("smollm3", {"no_rope_layers": [2, 1]}, "no_rope_layers is not supported"),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(base)


@pytest.mark.parametrize(
    ("name", "changes", "tensor"),
    [
        ("bloom", {"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ("falcon_rw", {"bias": False}, "unknown: .*query_key_value.bias"),
        ("falcon_rw", {"multi_query": True}, "misshapen: .*query_key_value"),
        ("falcon_40b", {"num_ln_in_parallel_attn": 1}, "missing: .*input_layernorm.*unknown: .*ln_attn"),
        ("gpt_neox", {"attention_bias": False}, "unknown: .*attention.dense.bias"),
        ("phi", {"qk_layernorm": True}, "missing: .*k_layernorm"),
        ("mistral", {"head_dim": 16}, "misshapen: .*q_proj"),
        ("qwen2", {"model_type": "llama"}, "unknown: .*k_proj.bias"),
        ("qwen3", {"model_type": "qwen2"}, "missing: .*k_proj.bias.*unknown: .*k_norm"),
        ("phi3", {"num_key_value_heads": 4}, r"misshapen: .*qkv_proj.weight \[128, 64\] instead of \[192, 64\]"),
        ("olmo2", {"model_type": "llama"}, "missing: .*input_layernorm.*unknown: .*k_norm"),
        ("smollm3", {"mlp_bias": True}, "missing: .*down_proj.bias"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_with_their_names(
    name: str, changes: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=tensor):
        LLM(base)
