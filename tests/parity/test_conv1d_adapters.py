"""Adapters of GPT-2, GPTBigCode and OPT: stored [in, out] or [out, in], biases and layer norms everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import BdLoraConfig, KasaConfig
from transformers import AutoModelForCausalLM

from graftlm import LLM
from graftlm.errors import AdapterUnsupported
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.method_rig import (
    PROMPT,
    Case,
    Expected,
    Method,
    assert_adapter_is_peft,
    assert_batch_is_peft,
    make_adapter,
    make_adapters,
)
from tests.parity.oracle import make_even_adapter, make_world
from tests.tiny import edit_json, make_model

# PEFT corrects fan_in_fan_out by each layer's type, and has advice on what is saved.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
BASES = ("gpt2", "gpt_bigcode", "gpt_bigcode_multi_head", "opt", "opt_post_norm")
GPT = ["c_attn", "c_proj", "c_fc"]
OPT = ["q_proj", "v_proj", "out_proj", "fc1", "fc2"]

# name -> base, config class, config.
CASES: dict[str, Case] = {
    "lora": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "fan_in_fan_out": True}),
    "lora-square-only": ("gpt2", peft.LoraConfig, {"target_modules": ["attn.c_proj"], "use_rslora": True}),
    "lora-all-linear": ("gpt2", peft.LoraConfig, {"target_modules": "all-linear", "lora_bias": True}),
    "lora-ends": ("gpt2", peft.LoraConfig, {"target_modules": ["wte", "lm_head"]}),
    "lora-bias-all": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "bias": "all"}),
    "lora-bias-only": ("gpt2", peft.LoraConfig, {"target_modules": ["c_proj"], "bias": "lora_only"}),
    "lora-tokens": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "trainable_token_indices": [5, 9]}),
    "alora": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "alora_invocation_tokens": [17, 18]}),
    "dora": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "use_dora": True, "use_rslora": True}),
    "dora-bias-all": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "use_dora": True, "bias": "all"}),
    "pissa": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "init_lora_weights": "pissa", "use_dora": True}),
    # PEFT decomposes the matrix as it is stored, which only a square one survives.
    "olora": ("gpt2", peft.LoraConfig, {"target_modules": ["attn.c_proj"], "init_lora_weights": "olora"}),
    "saved-conv1d": ("gpt2", peft.LoraConfig, {"target_modules": ["c_attn"], "modules_to_save": ["c_proj", "ln_1"]}),
    "saved-block-parts": ("gpt2", peft.LoraConfig, {"target_modules": ["c_attn"], "modules_to_save": ["mlp"]}),
    "saved-norm-bias-all": (
        "gpt2",
        peft.LoraConfig,
        {"target_modules": ["c_attn"], "modules_to_save": ["ln_1"], "bias": "all"},
    ),
    "adalora": ("gpt2", peft.AdaLoraConfig, {"target_modules": GPT, "init_r": 4, "total_step": 10, "bias": "all"}),
    "ia3-by-default": ("gpt2", peft.IA3Config, {}),
    "ia3-of-inputs": ("gpt2", peft.IA3Config, {"target_modules": GPT, "feedforward_modules": GPT}),
    "ln-tuning-by-default": ("gpt2", peft.LNTuningConfig, {}),
    "vera": ("gpt2", peft.VeraConfig, {"target_modules": GPT, "r": 8}),
    "vblora": ("gpt2", peft.VBLoRAConfig, {"target_modules": GPT, "num_vectors": 24, "vector_length": 8}),
    "fourierft": ("gpt2", peft.FourierFTConfig, {"n_frequency": 50}),
    "gralora": ("gpt2", peft.GraloraConfig, {"target_modules": GPT, "r": 8}),
    "hira": ("gpt2", peft.HiraConfig, {"target_modules": GPT, "r": 4}),
    "trainable-tokens": ("gpt2", peft.TrainableTokensConfig, {"token_indices": [5, 9]}),
    "multi-query-bias-all": ("gpt_bigcode", peft.LoraConfig, {"target_modules": GPT, "bias": "all"}),
    "multi-query-dora": ("gpt_bigcode", peft.LoraConfig, {"target_modules": [*GPT, "lm_head"], "use_dora": True}),
    "multi-query-ia3": ("gpt_bigcode", peft.IA3Config, {}),
    "multi-query-norms": ("gpt_bigcode", peft.LNTuningConfig, {"target_modules": ["ln_1", "ln_f"]}),
    "multi-query-oft": ("gpt_bigcode", peft.OFTConfig, {"target_modules": GPT, "bias": "all"}),
    "multi-head-olora": (
        "gpt_bigcode_multi_head",
        peft.LoraConfig,
        {"target_modules": GPT, "init_lora_weights": "olora"},
    ),
    "multi-head-saved": (
        "gpt_bigcode_multi_head",
        peft.LoraConfig,
        {"target_modules": ["c_fc"], "modules_to_save": ["c_attn", "wte"]},
    ),
    "multi-head-lokr": ("gpt_bigcode_multi_head", peft.LoKrConfig, {"target_modules": [*GPT, "lm_head"], "r": 2}),
    "opt-bias-all": ("opt", peft.LoraConfig, {"target_modules": OPT, "bias": "all"}),
    "opt-ia3": ("opt", peft.IA3Config, {}),
    "opt-tokens": ("opt", peft.LoraConfig, {"target_modules": OPT, "trainable_token_indices": [5, 9]}),
    "post-norm-all-linear": ("opt_post_norm", peft.LoraConfig, {"target_modules": "all-linear", "bias": "all"}),
    "post-norm-ends": ("opt_post_norm", peft.LoraConfig, {"target_modules": ["embed_tokens", "lm_head", "project_in"]}),
    "post-norm-norms": (
        "opt_post_norm",
        peft.LNTuningConfig,
        {"target_modules": ["self_attn_layer_norm", "final_layer_norm"]},
    ),
    "post-norm-saved": (
        "opt_post_norm",
        peft.LoraConfig,
        {"target_modules": ["fc1"], "modules_to_save": ["project_out", "final_layer_norm"]},
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_model(folder / name, FAMILY_CASES[name].config()) for name in BASES}


@pytest.fixture(scope="module")
def folders(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(CASES, bases, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_peft(
    name: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    base = CASES[name][0]
    assert_adapter_is_peft(name, llms[base], expected[name], unadapted[base])


@pytest.mark.parametrize("base", BASES)
def test_all_adapters_of_a_base_share_a_batch_without_touching_each_other(
    base: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    names = [name for name, case in CASES.items() if case[0] == base]
    assert_batch_is_peft(names, llms[base], expected, unadapted[base])


def test_r041_multi_query_projections_and_a_tied_head_give_pefts_32_tokens(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    world = make_world(bases["gpt_bigcode"])
    world.assert_parity({"tb": make_even_adapter(world.base, tmp_path / "tb", target_modules=GPT)}, max_tokens=32)


def test_r047_the_transposition_is_the_layers_whatever_the_config_says(
    bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    adapter = make_even_adapter(bases["gpt2"], tmp_path / "tp", target_modules=GPT, fan_in_fan_out=True)
    llm, logits = llms["gpt2"], []
    for flag in (True, False, None, ...):
        edit_json(adapter / "adapter_config.json", fan_in_fan_out=flag)
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["gpt2"]), adapter).eval()
        reference = model(torch.tensor([PROMPT])).logits[0].detach()
        llm.load_adapter("tp", adapter)
        logits.append(llm.logits(PROMPT, adapter="tp"))
        llm.unload_adapter("tp")
        torch.testing.assert_close(logits[-1], reference, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(logits[0], other) for other in logits)
    assert (logits[0] - llm.logits(PROMPT)).abs().max() > 1e-2


ON_LINEAR_LAYERS_ONLY: dict[str, tuple[Method, dict[str, Any]]] = {
    "boft": (peft.BOFTConfig, {}),
    "c3a": (peft.C3AConfig, {"block_size": 16}),
    "delora": (peft.DeloraConfig, {}),
    "hra": (peft.HRAConfig, {}),
    "loha": (peft.LoHaConfig, {}),
    "lokr": (peft.LoKrConfig, {}),
    "miss": (peft.MissConfig, {"r": 4}),
    "oft": (peft.OFTConfig, {}),
    "road": (peft.RoadConfig, {}),
    "shira": (peft.ShiraConfig, {"r": 4}),
    "kasa": (peft.LoraConfig, {"kasa_config": KasaConfig()}),
    "block-diagonal": (
        peft.LoraConfig,
        {"use_bdlora": BdLoraConfig(target_modules_bd_a=["attn.c_proj"], target_modules_bd_b=["c_fc"], nblocks=2)},
    ),
}


@pytest.mark.parametrize("name", ON_LINEAR_LAYERS_ONLY)
def test_methods_that_peft_does_not_define_for_conv1d_are_refused_by_module(
    name: str, bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    method, config = ON_LINEAR_LAYERS_ONLY[name]
    # GPTBigCode has the same modules as linear layers.
    adapter = make_adapter(
        bases["gpt_bigcode"],
        tmp_path / name,
        method(task_type="CAUSAL_LM", target_modules=["attn.c_proj", "c_fc"], **config),
    )
    llms["gpt_bigcode"].load_adapter(name, adapter)
    llms["gpt_bigcode"].unload_adapter(name)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["gpt2"]), adapter)
    with pytest.raises(AdapterUnsupported, match=r"transformer\.h\.0\.attn\.c_proj"):
        llms["gpt2"].load_adapter(name, adapter)
    assert name not in llms["gpt2"].adapters


ON_POSITIONS: dict[str, tuple[str, Method, dict[str, Any]]] = {
    "low-rank": ("gpt2", peft.LoraConfig, {"target_modules": ["wpe"]}),
    "low-rank-beside-others": ("gpt2", peft.LoraConfig, {"target_modules": ["wpe", "c_attn"], "use_dora": True}),
    "rows": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "trainable_token_indices": {"wpe": [1, 2]}}),
    "rows-alone": ("gpt2", peft.TrainableTokensConfig, {"target_modules": ["wpe"], "token_indices": [1, 2]}),
    "saved": ("gpt2", peft.LoraConfig, {"target_modules": GPT, "modules_to_save": ["wpe"]}),
    "saved-by-its-holder": (
        "gpt2",
        peft.LoraConfig,
        {"target_modules": ["lm_head"], "modules_to_save": ["transformer"]},
    ),
    "opt-saved": ("opt", peft.LoraConfig, {"target_modules": OPT, "modules_to_save": ["embed_positions"]}),
    "opt-low-rank": ("opt", peft.LoraConfig, {"target_modules": ["embed_positions"]}),
}


@pytest.mark.parametrize("name", ON_POSITIONS)
def test_an_adapter_of_the_position_table_is_refused_by_name_whatever_it_does(
    name: str, bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    base, method, config = ON_POSITIONS[name]
    adapter = make_adapter(bases[base], tmp_path / name, method(task_type="CAUSAL_LM", **config))
    with pytest.raises(AdapterUnsupported, match=r"transformer\.wpe|model\.decoder\.embed_positions"):
        llms[base].load_adapter(name, adapter)
    assert name not in llms[base].adapters
