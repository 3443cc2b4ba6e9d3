"""What is Gemma's own: windows, scaled embeddings, old spellings, the text part of a model that also sees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import AdapterCorrupt, CheckpointError
from graftlm.models.build import build_decoder
from tests.parity.family_cases import FAMILY_CASES, SPLIT_PROJECTIONS
from tests.parity.method_rig import assert_adapter_is_peft, make_adapter, run_peft
from tests.parity.oracle import (
    LOUD,
    Oracle,
    World,
    assert_close,
    count_ties,
    greedy,
    make_even_adapter,
    make_world,
    prompt_of,
)
from tests.tiny import edit_json, make_model

EVERYTHING = [*SPLIT_PROJECTIONS, "embed_tokens", "lm_head"]


def make_gemma(folder: Path, case: str, **settings: Any) -> Path:
    """A tiny model of one of the family cases. settings: what else its (text) config says."""
    config = FAMILY_CASES[case].config()
    for key, value in settings.items():
        setattr(config.get_text_config(), key, value)
    return make_model(folder, config)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(make_gemma(tmp_path_factory.mktemp("gemma2"), "gemma2"))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(make_gemma(tmp_path_factory.mktemp("gemma3"), "gemma3"))


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(6, 20), (30, 10), (8, 1), (9, 1)])
def test_r048_windows_of_eight_are_kept_by_prompts_and_by_cached_decodes_that_cross_them(
    prompt_len: int, max_tokens: int, gemma2: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(gemma2.base, tmp_path / "a", target_modules=EVERYTHING, ensure_weight_tying=False)
    prompt = prompt_of(prompt_len, 3)
    with gemma2.loaded({"a": adapter}):
        for name, path in ((None, None), ("a", adapter)):
            answer = greedy(gemma2.llm, [(name, prompt)], max_tokens)[0]
            whole = [*prompt, *answer]
            expected = gemma2.oracle.logits(whole, path)
            assert_close(gemma2.llm.logits(whole, adapter=name), expected)
            assert count_ties(expected[prompt_len - 1 : -1], answer) == 0


def test_the_window_of_the_reference_changes_the_logits_beyond_it_alone(gemma2: World, tmp_path: Path) -> None:
    wide = make_gemma(tmp_path / "wide", "gemma2", sliding_window=64)
    prompt = prompt_of(30, 3)
    moved = (Oracle(wide).logits(prompt) - gemma2.oracle.logits(prompt)).abs().amax(dim=1)
    assert moved[:8].max() < 1e-5
    assert moved[8:].max() > LOUD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embeddings_are_scaled_and_rounded_as_in_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_gemma(tmp_path, "gemma")
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).model.embed_tokens
    ours = build_decoder(open_checkpoint(base), dtype=dtype, device=torch.device("cpu")).embedding.tokens
    token_ids = torch.arange(259)
    assert torch.equal(ours(token_ids, ()), theirs(token_ids))


# Everything PEFT can put into an embedding; each gets Gemma's factor, but for virtual tokens.
EMBEDDING_ADAPTERS: dict[str, tuple[type[peft.PeftConfig], dict[str, Any]]] = {
    "lora": (peft.LoraConfig, {"target_modules": ["embed_tokens"]}),
    "dora": (peft.LoraConfig, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "saved": (peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved_both": (
        peft.LoraConfig,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "token_rows": (peft.LoraConfig, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 200, 255]}),
    "trainable_tokens": (
        peft.TrainableTokensConfig,
        {"target_modules": ["embed_tokens"], "token_indices": [5, 9, 200]},
    ),
    "prompt_tuning": (peft.PromptTuningConfig, {"num_virtual_tokens": 11}),
    "p_tuning": (peft.PromptEncoderConfig, {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("case", ["gemma", "gemma3_text", "gemma3"])
def test_adapters_of_a_scaled_embedding_are_served_as_by_peft(case: str, tmp_path: Path) -> None:
    base = make_gemma(tmp_path / "base", case)
    llm = LLM(base, kv_cache_bytes=1 << 20)
    unadapted = run_peft(base, None)
    for name, (method, settings) in EMBEDDING_ADAPTERS.items():
        adapter = make_adapter(base, tmp_path / name, method(task_type="CAUSAL_LM", **settings))
        llm.load_adapter(name, adapter)
        assert_adapter_is_peft(name, llm, run_peft(base, adapter), unadapted)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize(
    "config", [peft.IA3Config, peft.LNTuningConfig, peft.LoraConfig], ids=lambda kind: kind.__name__
)
def test_default_targets_are_those_of_peft(config: type[peft.PeftConfig], case: str, tmp_path: Path) -> None:
    base = make_gemma(tmp_path / "base", case)
    adapter = make_adapter(base, tmp_path / "adapter", config(task_type="CAUSAL_LM"))
    llm = LLM(base, kv_cache_bytes=1 << 20, adapters={"a": adapter})
    assert_adapter_is_peft("a", llm, run_peft(base, adapter), run_peft(base, None))


def to_v4_rope(config: dict[str, Any]) -> None:
    ropes = config.pop("rope_parameters")
    full, sliding = (ropes.get(kind, ropes) for kind in ("full_attention", "sliding_attention"))
    config["rope_theta"] = full["rope_theta"]
    config["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]} if "factor" in full else None
    if full is not sliding:
        config["rope_local_base_freq"] = sliding["rope_theta"]


def old_gemma(config: dict[str, Any]) -> None:
    to_v4_rope(config)
    config.update(hidden_act="gelu", hidden_activation=None)


def old_gemma2(config: dict[str, Any]) -> None:
    to_v4_rope(config)
    del config["layer_types"]
    config.update(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid", sliding_window_size=8)


def old_gemma3(config: dict[str, Any]) -> None:
    to_v4_rope(config)
    del config["layer_types"]
    config["sliding_window_pattern"] = 2


OLD_SPELLINGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "gemma": old_gemma,
    "gemma2": old_gemma2,
    "gemma3_text": old_gemma3,
}


@pytest.mark.parametrize("case", OLD_SPELLINGS)
def test_a_config_in_v4_spelling_means_the_same(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = make_gemma(tmp_path, case)
    prompt = prompt_of(30, 4)
    expected = Oracle(base).logits(prompt)
    path = base / "config.json"
    config = json.loads(path.read_text())
    OLD_SPELLINGS[case](config)
    path.write_text(json.dumps(config))
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(prompt), expected)
    assert_close(Oracle(base).logits(prompt), expected)
    assert "does not read" not in caplog.text


def test_a_text_config_that_leaves_out_what_is_usual_means_what_it_means_in_transformers(tmp_path: Path) -> None:
    # As the first multimodal checkpoints are written.
    usual = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
    }
    config = FAMILY_CASES["gemma3_text"].config()
    for key, value in {**usual, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}.items():
        setattr(config, key, value)
    config.layer_types = ["sliding_attention"]
    base = make_model(tmp_path, config)
    edit_json(base / "config.json", layer_types=..., **dict.fromkeys(usual, ...))
    prompt = prompt_of(12, 5)
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(prompt), Oracle(base).logits(prompt))


def to_memory_names(name: str) -> str:
    """As the weights are called in memory."""
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    return re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", name)


@pytest.mark.parametrize("rename", [str, to_memory_names], ids=["on_disk", "in_memory"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_both_layouts_of_a_multimodal_checkpoint_are_read(
    tied: bool, rename: Callable[[str], str], tmp_path: Path
) -> None:
    config = FAMILY_CASES["gemma3"].config()
    config.tie_word_embeddings = tied
    base = make_model(tmp_path, config)
    weights = base / "model.safetensors"
    renamed = {rename(name): tensor for name, tensor in load_file(weights).items()}
    assert any("vision_tower" in name for name in renamed)
    assert any("lm_head" in name for name in renamed) != tied
    save_file(renamed, weights, metadata={"format": "pt"})
    prompt = prompt_of(20, 6)
    assert_close(LLM(base, kv_cache_bytes=1 << 20).logits(prompt), Oracle(base).logits(prompt))


def test_an_adapter_that_also_reaches_into_the_vision_tower_is_served_and_counts_what_it_holds(
    multimodal: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(multimodal.base, tmp_path / "a", target_modules=["q_proj", "v_proj"])
    held = load_file(adapter / "adapter_model.safetensors")
    seeing = [name for name in held if "vision_tower" in name]
    assert seeing
    multimodal.assert_parity({"a": adapter})
    with multimodal.loaded({"a": adapter}):
        loaded = multimodal.llm.adapters["a"]
        assert (loaded.bound, loaded.total) == (len(held) - len(seeing), len(held))


def test_an_adapter_of_the_vision_tower_alone_is_refused(multimodal: World, tmp_path: Path) -> None:
    adapter = make_even_adapter(multimodal.base, tmp_path / "a", target_modules=r".*vision_tower.*q_proj")
    with pytest.raises(AdapterCorrupt, match="changes nothing in this base"):
        multimodal.llm.load_adapter("a", adapter)


def test_an_adapter_of_the_text_model_alone_fits_the_multimodal_checkpoint_and_the_other_way_round(
    multimodal: World, tmp_path: Path
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(multimodal.base)
    text = make_model(tmp_path / "text", FAMILY_CASES["gemma3_text"].config())
    alone = AutoModelForCausalLM.from_pretrained(text)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.save_pretrained(text)
    adapter = make_even_adapter(text, tmp_path / "a", target_modules=EVERYTHING, ensure_weight_tying=False)
    inside = make_even_adapter(multimodal.base, tmp_path / "b", target_modules=r"(?!.*vision).*(q|down)_proj")
    prompt = prompt_of(20, 7)
    llm = LLM(text, kv_cache_bytes=1 << 20, adapters={"a": adapter, "b": inside})
    with multimodal.loaded({"a": adapter, "b": inside}):
        assert_close(multimodal.llm.logits(prompt, adapter="a"), Oracle(text).logits(prompt, adapter))
        assert_close(llm.logits(prompt, adapter="b"), multimodal.oracle.logits(prompt, inside))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "both_ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    "other_activation": ("gemma2", {"hidden_activation": "mish"}, "hidden_activation is not supported"),
    "odd_heads": ("gemma", {"num_key_value_heads": 3}, "not a multiple of the number of key-value heads"),
    "layer_type": ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types is not supported"),
    "too_few_layer_types": ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is not supported"),
    "cap_nobody_applies": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    "rope": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "spiral", "rope_theta": 1e6}}},
        "rope type is not supported",
    ),
    "partial_rope": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
        "rope_parameters.sliding_attention.partial_rotary_factor is not supported",
    ),
    "wrong_sizes": ("gemma3_text", {"head_dim": 16}, "do not fit its config; got: misshapen: "),
    "gemma3n": ("gemma3_text", {"model_type": "gemma3n_text"}, "gemma3n_text is not supported: its four residual"),
    "gemma3n_multimodal": ("gemma3_text", {"model_type": "gemma3n"}, "gemma3n is not supported: its four residual"),
}


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_graft_does_not_compute_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = make_gemma(tmp_path, case)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(base)


def test_a_key_nobody_reads_is_reported_even_inside_the_text_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_gemma(tmp_path, "gemma3")
    text = json.loads((base / "config.json").read_text())["text_config"]
    edit_json(base / "config.json", text_config={**text, "residual_dropin": 3})
    LLM(base, kv_cache_bytes=1 << 20)
    assert "keys Graft does not read: text_config.residual_dropin" in caplog.text
