"""BLOOM, Falcon, GPT-NeoX and Phi as older releases wrote them, and what their configs are refused for."""

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
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_with_their_names(
    name: str, changes: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=tensor):
        LLM(base)
