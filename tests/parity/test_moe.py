"""Mixtures of experts beyond equal logits: half precision, neighbours in a batch, and checkpoints that contradict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from graftlm import LLM, SamplingParams
from graftlm.errors import CheckpointError
from tests.parity.family_cases import FAMILY_CASES, SMALL
from tests.parity.oracle import LOUD, World, assert_close, make_even_adapter, make_world, prompt_of
from tests.tiny import edit_json, make_model

EXPERTS_PER_TOKEN = 2
# FAMILIES.md §2.0, CMoE: between experts closer than this, half precision may choose either.
ROUTER_MARGIN = 0.02


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(make_model(tmp_path_factory.mktemp("qwen"), FAMILY_CASES["qwen2_moe"].config()))
    yield world
    world.llm.shutdown()


def test_a_row_does_not_depend_on_its_neighbours(qwen: World, tmp_path: Path) -> None:
    """Neighbours change how many rows an expert sees, and where a row stands among them."""
    adapter = make_even_adapter(
        qwen.base,
        tmp_path / "experts",
        target_modules=["q_proj"],
        target_parameters=list(FAMILY_CASES["qwen2_moe"].parameters),
    )
    rows = [(name, prompt_of(length, length)) for length in (1, 3, 17, 40) for name in (None, "experts")]
    with qwen.loaded({"experts": adapter}):
        together = _first_logprobs(qwen.llm, rows)
        for row, expected in zip(rows, together, strict=True):
            assert _first_logprobs(qwen.llm, [row])[0] == pytest.approx(expected, abs=1e-5)


def _first_logprobs(llm: LLM, rows: list[tuple[str | None, tuple[int, ...]]]) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest tokens after each prompt, computed in one batch."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for _, prompt in rows],
        SamplingParams(max_tokens=1, temperature=0, logprobs=5),
        adapter=[name for name, _ in rows],
    )
    found = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs
        found.append({token_id: logprob for token_id, _, logprob in logprobs[0].top})
    return found


@torch.no_grad()
def test_a_bfloat16_mixture_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    """Over the tokens whose experts are clear in every layer; where they are not, rounding decides."""
    config = MixtralConfig(**{**SMALL, "num_local_experts": 4, "num_experts_per_tok": EXPERTS_PER_TOKEN})
    base = make_model(tmp_path / "base", config, dtype=torch.bfloat16)
    half, single = (
        AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    llm = LLM(base, kv_cache_bytes=16 << 20)
    ours, theirs, exact = [], [], []
    for seed in range(16):
        prompt = prompt_of(128, 50 + seed)
        ids = torch.tensor([prompt])
        output = single(ids, output_router_logits=True)
        clear = torch.stack([_margin(logits) > ROUTER_MARGIN for logits in output.router_logits]).all(dim=0)
        ours.append(llm.logits(prompt)[clear])
        theirs.append(half(ids).logits[0].float()[clear])
        exact.append(output.logits[0][clear])
    mine, other, truth = torch.cat(ours), torch.cat(theirs), torch.cat(exact)
    assert len(truth) > 100
    assert _relative_error(mine, truth) <= 1.25 * _relative_error(other, truth) + 1e-3
    assert _agreement(mine, truth) >= _agreement(other, truth) - 0.01
    assert _agreement(mine, truth) > 0.9


def _margin(router_logits: Tensor) -> Tensor:
    """How much likelier the last expert that is chosen is than the first that is not."""
    ordered = router_logits.float().softmax(-1).sort(descending=True).values
    return ordered[:, EXPERTS_PER_TOKEN - 1] - ordered[:, EXPERTS_PER_TOKEN]


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def _agreement(ours: Tensor, exact: Tensor) -> float:
    return (ours.argmax(-1) == exact.argmax(-1)).double().mean().item()


def test_old_qwen2_moe_files_adapt_experts_and_the_shared_expert(qwen: World, tmp_path: Path) -> None:
    """Their names of projections mean both; PEFT with transformers 5 applies the shared expert's alone."""
    layer = "base_model.model.model.layers.0.mlp"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, rows in (("experts.1.up_proj", 48), ("shared_expert.up_proj", 40)):
        tensors[f"{layer}.{module}.lora_A.weight"] = torch.randn(4, 64, generator=generator) / 8
        tensors[f"{layer}.{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 2
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text("{}")
    edit_json(folder / "adapter_config.json", **config)
    merged = AutoModelForCausalLM.from_pretrained(qwen.base, dtype=torch.float32, attn_implementation="eager").eval()
    mlp = merged.model.layers[0].mlp
    delta_of = {
        module: tensors[f"{layer}.{module}.lora_B.weight"] @ tensors[f"{layer}.{module}.lora_A.weight"]
        for module in ("experts.1.up_proj", "shared_expert.up_proj")
    }
    prompt = prompt_of(30, 4)
    with torch.no_grad(), qwen.loaded({"old": folder}):
        mlp.experts.gate_up_proj[1, 48:] += delta_of["experts.1.up_proj"]
        mlp.shared_expert.up_proj.weight += delta_of["shared_expert.up_proj"]
        served = qwen.llm.logits(prompt, adapter="old")
        assert_close(served, merged(torch.tensor([prompt])).logits[0])
        assert (served - qwen.llm.logits(prompt)).abs().max() > LOUD


def _without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def _with_another(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: torch.zeros(3, 5)}


def _same(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


W1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
# case of the family, changes of config.json (... deletes), change of the tensors, what the error names.
CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "more_per_token_than_there_are": ("mixtral", {"num_experts_per_tok": 5}, _same, "num_experts_per_tok"),
    "no_experts": ("mixtral", {"num_local_experts": 0}, _same, "num_local_experts"),
    "an_expert_too_many": ("mixtral", {"num_local_experts": 5}, _same, r"missing: .*experts\.4\.w1"),
    "an_expert_too_few": ("mixtral", {"num_local_experts": 3}, _same, r"unknown: .*experts\.3\.w1"),
    "an_unknown_activation": ("mixtral", {"hidden_act": "mish"}, _same, "hidden_act"),
    "heads_that_do_not_divide": ("mixtral", {"num_key_value_heads": 3}, _same, "key-value heads"),
    "a_matrix_missing": ("mixtral", {}, _without(W1), r"missing: .*experts\.3\.w1"),
    "a_matrix_misshapen": ("mixtral", {}, _with_another(W1), r"misshapen: .*experts\.3\.w1.*\[3, 5\]"),
    "a_layer_said_to_be_dense": ("qwen2_moe", {"mlp_only_layers": [0]}, _same, r"missing: model\.layers\.0\.mlp\.down"),
    "a_list_that_is_none": ("qwen3_moe", {"mlp_only_layers": 1}, _same, "mlp_only_layers"),
    "no_rope": ("gpt_oss", {"rope_parameters": ...}, _same, "rope_parameters"),
    "stacks_misshapen": (
        "gpt_oss",
        {},
        _with_another("model.layers.0.mlp.experts.gate_up_proj"),
        r"misshapen: .*experts\.gate_up_proj \[3, 5\] instead of \[4, 64, 192\]",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_checkpoint_that_contradicts_itself_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, config, change, named = CONTRADICTIONS[name]
    base = make_model(tmp_path / "base", FAMILY_CASES[family].config())
    edit_json(base / "config.json", **config)
    weights = base / "model.safetensors"
    save_file(change(load_file(weights)), weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=named):
        LLM(base)


def test_a_mixtral_config_in_v4_spelling_means_the_same(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", FAMILY_CASES["mixtral"].config())
    prompt = prompt_of(20, 3)
    expected = LLM(base).logits(prompt)
    edit_json(
        base / "config.json",
        rope_parameters=...,
        rope_theta=1e6,
        dtype=...,
        torch_dtype="float32",
        sliding_window=None,
        router_jitter_noise=...,
    )
    assert torch.equal(LLM(base).logits(prompt), expected)
