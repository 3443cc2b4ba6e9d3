"""What is Gemma 4's own: lent keys and values, inputs for each layer, layers of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import AdapterUnsupported, CheckpointError
from graftlm.models.build import build_decoder
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.method_rig import assert_adapter_is_peft, make_adapter, run_peft
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter, prompt_of
from tests.tiny import edit_json, make_model

PROMPT = prompt_of(30, 4)


def make_gemma4(folder: Path, case: str = "gemma4_text") -> Path:
    return make_model(folder, FAMILY_CASES[case].config())


def change_tensors(base: Path, changes: dict[str, torch.Tensor]) -> None:
    path = base / "model.safetensors"
    save_file({**load_file(path), **changes}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("embed_tokens_per_layer", (259, 48)), ("per_layer_model_projection", (48, 60))],
    ids=["without_tokens", "without_context"],
)
def test_either_part_of_the_layer_inputs_moves_the_logits(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    base = make_gemma4(tmp_path)
    whole = Oracle(base).logits(PROMPT)
    change_tensors(base, {f"model.{name}.weight": torch.zeros(shape)})
    expected = Oracle(base).logits(PROMPT)
    assert (expected - whole).abs().max() > LOUD
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(PROMPT), expected)


def test_layers_that_borrow_keys_and_values_cache_none(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_gemma4(tmp_path))
    decoder = build_decoder(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert [(shape.num_kv_heads, shape.head_dim) for shape in decoder.kv_shapes] == [(2, 16), (2, 24)]


def test_what_files_hold_for_borrowed_keys_and_values_is_left_unread(tmp_path: Path) -> None:
    base = make_gemma4(tmp_path)
    expected = Oracle(base).logits(PROMPT)
    borrowed = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (2, 3) for name in ("k_proj", "k_norm")]
    change_tensors(base, {name: torch.ones(3) for name in borrowed})
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(PROMPT), expected)


def test_a_config_that_sizes_kinds_of_layers_means_the_same_as_one_that_sizes_each(tmp_path: Path) -> None:
    base = make_gemma4(tmp_path, "gemma4_text_plain")
    expected = Oracle(base).logits(PROMPT)
    edit_json(base / "config.json", per_layer_config=..., global_head_dim=24, num_global_key_value_heads=1)
    assert_close(Oracle(base).logits(PROMPT), expected)
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(PROMPT), expected)


ADAPTERS: dict[str, tuple[type[peft.PeftConfig], dict[str, Any]]] = {
    "embedding": (peft.LoraConfig, {"target_modules": ["embed_tokens"]}),
    "dora": (
        peft.LoraConfig,
        {"target_modules": ["k_proj", "v_proj", "per_layer_model_projection"], "use_dora": True},
    ),
    "all_linear": (peft.LoraConfig, {"target_modules": "all-linear"}),
    "saved_norm": (
        peft.LoraConfig,
        {"target_modules": ["q_proj"], "modules_to_save": ["per_layer_projection_norm", "k_norm"]},
    ),
    "token_rows": (peft.LoraConfig, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]}),
    "ia3": (peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("case", ["gemma4_text", "gemma4_text_plain"])
def test_adapters_are_served_as_by_peft(case: str, tmp_path: Path) -> None:
    base = make_gemma4(tmp_path / "base", case)
    llm, unadapted = LLM(base, kv_cache_bytes=1 << 20), run_peft(base, None)
    for name, (method, settings) in ADAPTERS.items():
        if case == "gemma4_text" or "per_layer" not in str(settings):
            adapter = make_adapter(base, tmp_path / name, method(task_type="CAUSAL_LM", **settings))
            llm.load_adapter(name, adapter)
            assert_adapter_is_peft(name, llm, run_peft(base, adapter), unadapted)


def test_virtual_tokens_are_refused_where_layers_read_the_token_itself_and_served_where_not(tmp_path: Path) -> None:
    plain, whole = make_gemma4(tmp_path / "plain", "gemma4_text_plain"), make_gemma4(tmp_path / "whole")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    adapter = make_adapter(plain, tmp_path / "adapter", config)
    llm = LLM(plain, kv_cache_bytes=1 << 20, adapters={"a": adapter})
    assert_adapter_is_peft("a", llm, run_peft(plain, adapter), run_peft(plain, None))
    with pytest.raises(AdapterUnsupported, match="the adapter brings tokens of its own"):
        LLM(whole, kv_cache_bytes=1 << 20, adapters={"a": adapter})


def test_an_adapter_of_the_table_of_layer_inputs_is_refused_by_name(tmp_path: Path) -> None:
    base = make_gemma4(tmp_path / "base")
    adapter = make_even_adapter(base, tmp_path / "a", target_modules=["embed_tokens_per_layer"])
    with pytest.raises(AdapterUnsupported, match="embed_tokens_per_layer"):
        LLM(base, kv_cache_bytes=1 << 20, adapters={"a": adapter})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both_ways": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    "nothing_to_borrow": ({"num_kv_shared_layers": 3}, "without one that has keys and values"),
    "another_vocabulary": ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is not vocab_size"),
    "unknown_size": ({"per_layer_config": {"1": {"attention_bias": True}}}, "per_layer_config.1.attention_bias"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_graft_does_not_compute_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = make_gemma4(tmp_path)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(base)
