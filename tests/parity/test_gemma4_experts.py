"""Gemma 4's experts, beside a dense feed-forward layer: their router, adapters of them, and configs that contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Gemma4Config, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

from graftlm import LLM
from graftlm.errors import AdapterError, CheckpointError
from graftlm.layers.linear import Linear
from graftlm.layers.moe import Router, RouterScale
from graftlm.layers.norm import RMSNorm
from graftlm.layers.patch import Slot
from graftlm.layers.segments import Segments
from graftlm.quantization import DenseWeight
from tests.parity.family_cases import FAMILY_CASES, GEMMA4_MOE, GEMMA4_VISION
from tests.parity.method_rig import assert_adapter_is_peft, make_adapter, run_peft
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter, prompt_of
from tests.tiny import edit_json, make_model

PROMPT = prompt_of(30, 4)


def make_base(folder: Path) -> Path:
    return make_model(folder, FAMILY_CASES["gemma4_moe"].config())


EXPERT_ADAPTERS: dict[str, tuple[type[peft.PeftConfig], dict[str, Any]]] = {
    "all_linear": (peft.LoraConfig, {"target_modules": "all-linear"}),
    "one_stack": (peft.LoraConfig, {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    "saved": (
        peft.LoraConfig,
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["router.proj", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"],
        },
    ),
    "ia3": (peft.IA3Config, {"target_modules": ["k_proj", "router.proj"], "feedforward_modules": []}),
}


def test_adapters_of_experts_and_the_linear_router_are_served_as_by_peft(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    llm, unadapted = LLM(base, kv_cache_bytes=1 << 20), run_peft(base, None)
    for name, (method, settings) in EXPERT_ADAPTERS.items():
        adapter = make_adapter(base, tmp_path / name, method(task_type="CAUSAL_LM", **settings))
        llm.load_adapter(name, adapter)
        assert_adapter_is_peft(name, llm, run_peft(base, adapter), unadapted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["router"]}, r"layers\.0\.router"),
        ({"modules_to_save": ["experts"]}, r"layers\.0\.experts"),
        ({"target_parameters": ["router.scale"]}, r"target_parameters names router\.scale"),
        ({"target_parameters": ["experts.down_proj"], "use_dora": True}, "use_dora does not go with"),
    ],
    ids=["saved_router", "saved_experts", "scale", "dora"],
)
def test_what_is_done_to_experts_otherwise_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base")
    saved = {key: value for key, value in changes.items() if key == "modules_to_save"}
    adapter = make_even_adapter(base, tmp_path / "a", target_modules=["q_proj"], **saved)
    edit_json(adapter / "adapter_config.json", **changes)
    with pytest.raises(AdapterError, match=message):
        LLM(base, kv_cache_bytes=1 << 20, adapters={"a": adapter})


def test_experts_inside_a_model_that_also_sees_are_served(tmp_path: Path) -> None:
    """The released one: no inputs for each layer, nothing lent, keys that are values too."""
    text = {**GEMMA4_MOE, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
    config = Gemma4Config(text_config=text, vision_config=GEMMA4_VISION, audio_config=None)
    base = make_model(tmp_path / "base", config)
    adapter = make_even_adapter(
        base, tmp_path / "a", target_modules=[], target_parameters=["experts.gate_up_proj", "router.proj.weight"]
    )
    llm, oracle = LLM(base, kv_cache_bytes=1 << 20, adapters={"a": adapter}), Oracle(base)
    assert_close(llm.logits(PROMPT), oracle.logits(PROMPT))
    assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, adapter))
    assert (oracle.logits(PROMPT, adapter) - oracle.logits(PROMPT)).abs().max() > LOUD


def test_bfloat16_tokens_go_to_the_experts_transformers_sends_them_to() -> None:
    config = Gemma4TextConfig(**GEMMA4_MOE)
    torch.manual_seed(0)
    theirs = Gemma4TextRouter(config).bfloat16()
    x = torch.randn(200, config.hidden_size).bfloat16()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) + 1)
        _, expected, expected_experts = theirs(x)
    ours = Router(
        linear=Linear(Slot("router"), DenseWeight(theirs.proj.weight.detach())),
        experts_per_token=2,
        renormalise=True,
        norm=RMSNorm(Slot("norm"), None, config.rms_norm_eps),
        scale=RouterScale(vector=theirs.scale.detach(), factor=config.hidden_size**-0.5),
        expert_scale=theirs.per_expert_scale.detach(),
    )
    weights, experts = ours(x, Segments())
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unsaid": ({"num_experts": ...}, "num_experts is not a positive integer"),
    "more_per_token_than_there_are": ({"top_k_experts": 5}, "top_k_experts is larger"),
    "fewer_than_there_are": ({"num_experts": 3}, r"misshapen: model\.layers\.0\.router\.proj\.weight"),
    "none": ({"enable_moe_block": False}, r"unknown: model\.layers\.0\.experts\.down_proj"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_does_not_fit_the_experts_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path)
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        LLM(base)
