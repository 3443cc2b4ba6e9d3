"""Adapters on what other families have and Llama lacks: projections fused on disk, norms and heads with biases, an
embedding norm, positions without rotation (R042)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm import LLM
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.method_rig import (
    PROMPT,
    Case,
    Expected,
    assert_adapter_is_peft,
    assert_batch_is_peft,
    make_adapter,
    make_adapters,
    run_peft,
)
from tests.tiny import make_model

# PEFT warns of a head among the targets, whose weight it saves as well, and of block sizes that it adjusts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # Prefix tuning hands its cache to transformers under the old name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

BASES = (
    "bloom",
    "bloom_normed_residual",
    "falcon_40b",
    "falcon_rw",
    "gpt_neox",
    "mistral_window",
    "olmo2_biases",
    "phi",
    "phi3_window_partial",
    "phi_qk_norm",
    "qwen2",
    "qwen3_biases_window",
    "smollm3_window",
)
ALL_FUSED = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
ALL_OF_PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ALL_OF_PHI = ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]

# name -> base, config class, config.
CASES: dict[str, Case] = {
    "bloom-by-default": ("bloom", peft.LoraConfig, {}),
    "bloom-all-linear": ("bloom", peft.LoraConfig, {"target_modules": "all-linear", "bias": "all"}),
    "bloom-prefix": ("bloom", peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    "neox-prefix": ("gpt_neox", peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    "mistral-window-prefix": ("mistral_window", peft.PrefixTuningConfig, {"num_virtual_tokens": 20}),
    "phi-prefix": ("phi", peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    "bloom-norms-saved": (
        "bloom",
        peft.LoraConfig,
        {"target_modules": ["dense"], "modules_to_save": ["word_embeddings_layernorm", "input_layernorm", "ln_f"]},
    ),
    "bloom-projection-saved": (
        "bloom",
        peft.LoraConfig,
        {"target_modules": ["dense_4h_to_h"], "modules_to_save": ["query_key_value", "post_attention_layernorm"]},
    ),
    "bloom-ia3-by-default": ("bloom", peft.IA3Config, {}),
    "bloom-ln-tuning-by-default": ("bloom", peft.LNTuningConfig, {}),
    "bloom-prompt-tuning": ("bloom", peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
    "bloom-tokens": ("bloom", peft.TrainableTokensConfig, {"token_indices": [9, 5, 200]}),
    "bloom-normed-residual-prompt-tuning": (
        "bloom_normed_residual",
        peft.PromptTuningConfig,
        {"num_virtual_tokens": 17},
    ),
    "bloom-normed-residual-norms": (
        "bloom_normed_residual",
        peft.LNTuningConfig,
        {"target_modules": ["input_layernorm", "post_attention_layernorm", "word_embeddings_layernorm"]},
    ),
    "groups-by-default": ("falcon_40b", peft.LoraConfig, {}),
    "groups-saved": (
        "falcon_40b",
        peft.LoraConfig,
        {"target_modules": ["dense"], "modules_to_save": ["query_key_value", "ln_attn", "ln_mlp"]},
    ),
    "groups-ia3-by-default": ("falcon_40b", peft.IA3Config, {}),
    "groups-ln-tuning-by-default": ("falcon_40b", peft.LNTuningConfig, {}),
    "groups-road": ("falcon_40b", peft.RoadConfig, {"variant": "road_4", "group_size": 8, "target_modules": ALL_FUSED}),
    "groups-oft": ("falcon_40b", peft.OFTConfig, {"oft_block_size": 8, "target_modules": ALL_FUSED}),
    "groups-boft": ("falcon_40b", peft.BOFTConfig, {"boft_block_size": 8, "target_modules": ALL_FUSED}),
    "groups-vera": ("falcon_40b", peft.VeraConfig, {"r": 8}),
    "groups-loha": ("falcon_40b", peft.LoHaConfig, {"r": 3, "target_modules": ALL_FUSED}),
    "groups-lokr": ("falcon_40b", peft.LoKrConfig, {"r": 2, "target_modules": ALL_FUSED, "decompose_both": True}),
    "rw-by-default": ("falcon_rw", peft.LoraConfig, {"bias": "all"}),
    "rw-prompt-tuning": ("falcon_rw", peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
    "rw-ia3-by-default": ("falcon_rw", peft.IA3Config, {}),
    "neox-by-default": ("gpt_neox", peft.LoraConfig, {}),
    "neox-all-linear": ("gpt_neox", peft.LoraConfig, {"target_modules": "all-linear", "bias": "all"}),
    "neox-ia3-by-default": ("gpt_neox", peft.IA3Config, {}),
    "neox-ln-tuning": (
        "gpt_neox",
        peft.LNTuningConfig,
        {"target_modules": ["input_layernorm", "post_attention_layernorm", "final_layer_norm"]},
    ),
    "neox-ends-saved": (
        "gpt_neox",
        peft.LoraConfig,
        {"target_modules": ["query_key_value"], "modules_to_save": ["embed_in", "lm_head"]},
    ),
    "neox-prompt-tuning": ("gpt_neox", peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
    "neox-adalora": ("gpt_neox", peft.AdaLoraConfig, {"init_r": 6, "total_step": 10}),
    "phi-by-default": ("phi", peft.LoraConfig, {}),
    "phi-head": ("phi", peft.LoraConfig, {"target_modules": ["lm_head"]}),
    "phi-head-with-lora-bias": ("phi", peft.LoraConfig, {"target_modules": ["lm_head", "fc1"], "lora_bias": True}),
    "phi-head-dora": ("phi", peft.LoraConfig, {"target_modules": ["lm_head", "q_proj"], "use_dora": True}),
    "phi-head-saved": ("phi", peft.LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "phi-every-bias": ("phi", peft.LoraConfig, {"target_modules": ["k_proj"], "bias": "all"}),
    "phi-biases-of-targets": ("phi", peft.LoraConfig, {"target_modules": ["lm_head", "fc2"], "bias": "lora_only"}),
    "phi-ia3-by-default": ("phi", peft.IA3Config, {}),
    "phi-ia3-head": ("phi", peft.IA3Config, {"target_modules": ["lm_head", "fc1"], "feedforward_modules": ["fc1"]}),
    "phi-ln-tuning-by-default": ("phi", peft.LNTuningConfig, {}),
    "phi-tokens-both-ends": (
        "phi",
        peft.TrainableTokensConfig,
        {"token_indices": [40, 7], "target_modules": ["embed_tokens", "lm_head"]},
    ),
    "phi-tokens-of-lora": (
        "phi",
        peft.LoraConfig,
        {"target_modules": ["dense"], "trainable_token_indices": {"lm_head": [3, 9]}},
    ),
    "phi-vera-head": ("phi", peft.VeraConfig, {"r": 8, "target_modules": ["lm_head"], "bias": "all"}),
    "phi-oft-head": ("phi", peft.OFTConfig, {"oft_block_size": 8, "target_modules": ["lm_head"]}),
    "phi-qk-norms-saved": (
        "phi_qk_norm",
        peft.LoraConfig,
        {"target_modules": ALL_OF_PHI, "modules_to_save": ["q_layernorm", "k_layernorm"]},
    ),
    "phi-qk-norms-tuned": ("phi_qk_norm", peft.LNTuningConfig, {"target_modules": ["q_layernorm", "final_layernorm"]}),
    "phi-tied-tokens": ("phi_qk_norm", peft.TrainableTokensConfig, {"token_indices": [9, 5, 200]}),
    "phi-tied-head": ("phi_qk_norm", peft.LoraConfig, {"target_modules": ["lm_head"], "bias": "all"}),
    "qwen2-by-default": ("qwen2", peft.LoraConfig, {"bias": "all"}),
    "qwen2-ia3-by-default": ("qwen2", peft.IA3Config, {}),
    "qwen2-ln-tuning-by-default": ("qwen2", peft.LNTuningConfig, {}),
    "qwen2-v-alone": ("qwen2", peft.LoraConfig, {"target_modules": ["v_proj"]}),
    "qwen2-up-and-k-of-other-ranks": (
        "qwen2",
        peft.LoraConfig,
        {"target_modules": ["up_proj", "k_proj"], "rank_pattern": {"up_proj": 3, "k_proj": 12}},
    ),
    "qwen3-by-default": ("qwen3_biases_window", peft.LoraConfig, {"use_dora": True}),
    "qwen3-ia3-by-default": ("qwen3_biases_window", peft.IA3Config, {}),
    "qwen3-ln-tuning-by-default": ("qwen3_biases_window", peft.LNTuningConfig, {}),
    "qwen3-head-norms-tuned": ("qwen3_biases_window", peft.LNTuningConfig, {"target_modules": ["q_norm", "k_norm"]}),
    "qwen3-head-norms-saved": (
        "qwen3_biases_window",
        peft.LoraConfig,
        {"target_modules": "all-linear", "bias": "all", "modules_to_save": ["q_norm", "k_norm", "norm"]},
    ),
    "olmo2-wide-norms-saved": (
        "olmo2_biases",
        peft.LoraConfig,
        {
            "target_modules": ["q_proj", "k_proj"],
            "bias": "all",
            "modules_to_save": ["q_norm", "k_norm", "post_feedforward_layernorm"],
        },
    ),
    "olmo2-norms-tuned": (
        "olmo2_biases",
        peft.LNTuningConfig,
        {"target_modules": ["q_norm", "post_attention_layernorm", "norm"]},
    ),
    "olmo2-dora": ("olmo2_biases", peft.LoraConfig, {"target_modules": ["k_proj", "o_proj"], "use_dora": True}),
    "mistral-by-default": ("mistral_window", peft.LoraConfig, {"use_rslora": True}),
    "mistral-ia3-by-default": ("mistral_window", peft.IA3Config, {}),
    "mistral-ln-tuning-by-default": ("mistral_window", peft.LNTuningConfig, {}),
    "mistral-prompt-tuning": ("mistral_window", peft.PromptTuningConfig, {"num_virtual_tokens": 30}),
    "smollm3-all-linear": ("smollm3_window", peft.LoraConfig, {"target_modules": "all-linear", "use_dora": True}),
    "smollm3-tokens": ("smollm3_window", peft.TrainableTokensConfig, {"token_indices": [9, 5, 200]}),
    "phi3-r046-fused": ("phi3_window_partial", peft.LoraConfig, {"target_modules": ALL_OF_PHI3}),
    "phi3-r046-qkv-alone": ("phi3_window_partial", peft.LoraConfig, {"target_modules": ["qkv_proj"]}),
    "phi3-r046-gate-up-alone": ("phi3_window_partial", peft.LoraConfig, {"target_modules": ["gate_up_proj"]}),
    "phi3-dora": ("phi3_window_partial", peft.LoraConfig, {"target_modules": ALL_OF_PHI3, "use_dora": True}),
    "phi3-saved": (
        "phi3_window_partial",
        peft.LoraConfig,
        {"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj", "lm_head"]},
    ),
    "phi3-ia3": (
        "phi3_window_partial",
        peft.IA3Config,
        {"target_modules": ["qkv_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "phi3-oft": ("phi3_window_partial", peft.OFTConfig, {"oft_block_size": 8, "target_modules": ALL_OF_PHI3}),
    "phi3-loha": ("phi3_window_partial", peft.LoHaConfig, {"r": 3, "target_modules": ALL_OF_PHI3}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_model(folder / name, FAMILY_CASES[name].config()) for name in BASES}


@pytest.fixture(scope="module")
def folders(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(CASES, bases, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", CASES)
def test_r042_logits_and_greedy_tokens_are_those_of_peft(
    name: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    base = CASES[name][0]
    assert_adapter_is_peft(name, llms[base], expected[name], unadapted[base])


@pytest.mark.parametrize("base", BASES)
def test_adapters_and_base_share_a_batch_without_touching_each_other(
    base: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    names = [name for name, case in CASES.items() if case[0] == base]
    assert_batch_is_peft(names, llms[base], expected, unadapted[base])


@pytest.mark.parametrize("vocab_size", [300, 200])
def test_a_head_with_a_bias_may_have_another_length_for_an_adapter(
    vocab_size: int, bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "embed_tokens"])
    make_adapter(bases["phi"], tmp_path, config, vocab_size=vocab_size)
    prompt = [5, 9, 170, vocab_size - 1]
    reference = run_peft(bases["phi"], tmp_path, vocab_size=vocab_size, prompt=prompt)
    llms["phi"].load_adapter("resized", tmp_path)
    logits = llms["phi"].logits(prompt, adapter="resized")
    torch.testing.assert_close(logits[:, :vocab_size], reference.logits, rtol=1e-4, atol=1e-4)
    assert torch.isneginf(logits[:, vocab_size:]).all()
    llms["phi"].unload_adapter("resized")


def test_a_prefix_for_heads_that_share_keys_here_is_refused_by_name(tmp_path: Path) -> None:
    """transformers' Falcon 40B keeps a key for every query head, and PEFT a prefix for each."""
    base = make_model(tmp_path / "base", FAMILY_CASES["falcon_40b"].config())
    folder = make_adapter(
        base, tmp_path / "prefix", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    llm = LLM(base)
    with pytest.raises(AdapterIncompatible, match="another number of key-value heads; got: num_attention_heads=4"):
        llm.load_adapter("prefix", folder)
    llm.shutdown()


def test_token_rows_of_a_head_with_trained_biases_are_refused_by_name(
    bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], bias="all", trainable_token_indices={"lm_head": [3]}
    )
    make_adapter(bases["phi"], tmp_path, config)
    with pytest.raises(AdapterUnsupported, match="bias='all'"):
        llms["phi"].load_adapter("refused", tmp_path)


@pytest.mark.parametrize("name", ["qwen2", "bloom", "falcon_7b_biases"])
def test_r045_large_biases_of_a_fused_projection_survive_adapters(name: str, tmp_path: Path) -> None:
    """An adapter of zeros is the base to the bit, a loud one is PEFT's."""
    case = FAMILY_CASES[name]
    base = make_model(tmp_path / "base", case.config())
    weights = base / "model.safetensors"
    torch.manual_seed(0)
    large = {
        key: tensor.sign() * 5 if re.search(r"(_proj|query_key_value)\.bias$", key) else tensor
        for key, tensor in load_file(weights).items()
    }
    save_file(large, weights, metadata={"format": "pt"})
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(case.targets))
    loud = make_adapter(base, tmp_path / "loud", config)
    silent = Path(shutil.copytree(loud, tmp_path / "silent"))
    adapter = load_file(silent / "adapter_model.safetensors")
    save_file(
        {key: torch.zeros_like(tensor) if "lora_B" in key else tensor for key, tensor in adapter.items()},
        silent / "adapter_model.safetensors",
    )
    llm = LLM(base, adapters={"loud": loud, "silent": silent})
    assert torch.equal(llm.logits(PROMPT, adapter="silent"), llm.logits(PROMPT))
    unadapted = run_peft(base, None)
    torch.testing.assert_close(llm.logits(PROMPT), unadapted.logits, rtol=1e-4, atol=1e-4)
    assert_adapter_is_peft("loud", llm, run_peft(base, loud), unadapted)


@pytest.mark.parametrize("target", ["q_proj", "v_proj", "gate_proj", "up_proj"])
def test_r046_an_adapter_of_separate_projections_does_not_fit_fused_ones(
    target: str, llms: dict[str, LLM], bases: dict[str, Path], tmp_path: Path
) -> None:
    make_adapter(bases["qwen2"], tmp_path, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[target]))
    with pytest.raises(AdapterIncompatible, match=target):
        llms["phi3_window_partial"].load_adapter("split", tmp_path)
    assert "split" not in llms["phi3_window_partial"].adapters


@pytest.mark.parametrize("target", ["q_norm", "k_norm"])
def test_a_head_norm_of_another_size_does_not_fit(
    target: str, llms: dict[str, LLM], bases: dict[str, Path], tmp_path: Path
) -> None:
    """OLMo-2's norms of the same names are as wide as the whole projection."""
    make_adapter(bases["olmo2_biases"], tmp_path, peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=[target]))
    with pytest.raises(AdapterIncompatible, match=target):
        llms["qwen3_biases_window"].load_adapter("wide", tmp_path)
