"""Adapters on experts and routers: as parameters in both of PEFT's layouts, and as the modules they used to be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from graftlm import merge
from graftlm.errors import AdapterError, AdapterIncompatible, AdapterUnsupported
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import LOUD, World, assert_close, make_even_adapter, make_world, prompt_of
from tests.tiny import edit_json, make_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# down_proj is square, gate_up_proj is not.
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, RANK = 2, 4, 64, 64, 4
# The two parameters of the experts, and the router's.
GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
STACKS = {GATE_UP: ("w1", "w3"), DOWN: ("w2",)}
EXPERT = ("w1", "w2", "w3")
SHAPES = {
    "w1": (INTERMEDIATE, HIDDEN),
    "w2": (HIDDEN, INTERMEDIATE),
    "w3": (INTERMEDIATE, HIDDEN),
    "gate": (EXPERTS, HIDDEN),
    "q_proj": (HIDDEN, HIDDEN),
}
# What an adapter does to one module, by the module's path: lora_A and lora_B.
Pairs = Mapping[str, tuple[Tensor, Tensor]]
# PEFT warns of patterns it wrote itself, and of those that match in some layers only.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    config = MixtralConfig(**{**FAMILY_CASES["mixtral"].settings, "intermediate_size": INTERMEDIATE})
    world = make_world(make_model(tmp_path_factory.mktemp("mixtral"), config))
    yield world
    world.llm.shutdown()


def test_experts_and_routers_adapted_as_parameters_are_served_as_by_peft(mixtral: World, tmp_path: Path) -> None:
    """A batch holds all of them and rows of the base, so that an expert sees several adapters at once."""
    cases: dict[str, dict[str, Any]] = {
        "experts": {"target_modules": [], "target_parameters": [GATE_UP, DOWN]},
        "down": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
        "router": {"target_modules": ["gate"], "r": 2},
        "all": {"target_modules": ["q_proj", "o_proj", "gate", "w1", "w2", "w3"]},
        "all_linear": {"target_modules": "all-linear"},
        "ranks": {
            "target_modules": [],
            "target_parameters": [GATE_UP, DOWN, ROUTER],
            "rank_pattern": {"gate_up_proj": 3, r"layers\.1\..*gate\.weight": 1},
            "alpha_pattern": {"down_proj": 5, "gate.weight": 9},
        },
        "rslora": {"target_modules": [], "target_parameters": [GATE_UP, DOWN], "use_rslora": True},
        "plain_parameter": {"target_modules": [], "target_parameters": ["self_attn.o_proj.weight"]},
        "saved_router": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    }
    mixtral.assert_parity(
        {
            name: make_even_adapter(mixtral.base, tmp_path / name, **{"r": RANK, "lora_alpha": RANK, **config})
            for name, config in cases.items()
        },
        max_tokens=8,
    )


def test_r044_files_that_name_each_expert_are_served_as_peft_converts_them(mixtral: World, tmp_path: Path) -> None:
    everything = {
        **_random_pairs([f"block_sparse_moe.experts.{expert}.{name}" for expert in range(EXPERTS) for name in EXPERT]),
        **_random_pairs(["block_sparse_moe.gate", "self_attn.q_proj"], seed=1),
    }
    targets = ["q_proj", "gate", *EXPERT]
    adapters = {
        "all": _write(tmp_path / "all", everything, target_modules=targets),
        "experts": _write(
            tmp_path / "experts",
            {path: pair for path, pair in everything.items() if ".experts." in path},
            target_modules=list(EXPERT),
            lora_dropout=0.0,
        ),
        "down": _write(
            tmp_path / "down",
            {path: pair for path, pair in everything.items() if path.endswith("w2")},
            target_modules=["w2"],
            use_rslora=True,
        ),
    }
    mixtral.assert_parity(adapters, max_tokens=8)
    with mixtral.loaded(adapters):
        assert mixtral.llm.adapters["all"].bound == len(everything) * 2


@pytest.mark.parametrize("modules", [["experts.0.w1"], ["gate"], ["experts.3.w2"], ["experts.1.w1", "experts.1.w3"]])
def test_r043_single_experts_and_routers_equal_the_same_deltas_on_stacked_parameters(
    modules: list[str], mixtral: World, tmp_path: Path
) -> None:
    """PEFT itself cannot load the first form when an expert or one of gate and up is missing."""
    pairs = _random_pairs([f"block_sparse_moe.{name}" for name in modules])
    single = _write(tmp_path / "single", pairs, target_modules=modules)
    stacked = _write_stacked(tmp_path / "stacked", pairs)
    prompt = prompt_of(64, 5)
    with mixtral.loaded({"single": single, "stacked": stacked}):
        served = mixtral.llm.logits(prompt, adapter="single")
        assert_close(served, mixtral.llm.logits(prompt, adapter="stacked"))
        assert_close(served, mixtral.oracle.logits(prompt, stacked))
        assert (served - mixtral.llm.logits(prompt)).abs().max() > LOUD


def test_r043_an_adapter_on_an_expert_that_no_token_goes_to_answers_as_the_base(mixtral: World, tmp_path: Path) -> None:
    visited, unvisited = _prompts_by_visit(mixtral.base, expert=3)
    pairs = _random_pairs([f"block_sparse_moe.experts.3.{name}" for name in EXPERT])
    adapter = _write(tmp_path / "third", pairs, target_modules=[f"experts.3.{name}" for name in EXPERT])
    with mixtral.loaded({"third": adapter}):
        for prompt in unvisited:
            assert torch.equal(mixtral.llm.logits(prompt, adapter="third"), mixtral.llm.logits(prompt))
        for prompt in visited:
            moved = mixtral.llm.logits(prompt, adapter="third") - mixtral.llm.logits(prompt)
            assert moved.abs().max() > LOUD


def test_r019_adapters_on_experts_are_merged_whichever_form_they_have(mixtral: World, tmp_path: Path) -> None:
    pairs = _random_pairs([f"block_sparse_moe.experts.{expert}.{name}" for expert in (0, 2) for name in EXPERT])
    pairs |= _random_pairs(["block_sparse_moe.gate"], seed=1)
    stacked = _write_stacked(tmp_path / "stacked", pairs)
    single = _write(tmp_path / "single", pairs, target_modules=["gate", *EXPERT])
    prompt = prompt_of(30, 8)
    for adapter in (stacked, single):
        merge(mixtral.base, adapter, tmp_path / "merged" / adapter.name)
        model = MixtralForCausalLM.from_pretrained(tmp_path / "merged" / adapter.name, dtype=torch.float32).eval()
        with torch.no_grad():
            merged = model(torch.tensor([prompt])).logits[0]
        assert_close(merged, mixtral.oracle.logits(prompt, stacked))
        assert (merged - mixtral.oracle.logits(prompt)).abs().max() > LOUD


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2"])
def test_stacked_factors_are_read_in_the_layout_of_the_peft_that_wrote_them(
    version: str, mixtral: World, tmp_path: Path
) -> None:
    """Up to 0.19.0 lora_A read the second dimension of a parameter that is [experts, out, in]. gate_up_proj tells by
    its shape, a square one by the version alone."""
    pairs = _random_pairs([f"block_sparse_moe.experts.{expert}.{name}" for expert in range(EXPERTS) for name in EXPERT])
    present = _write_stacked(tmp_path / "present", pairs)
    old = _write_stacked(tmp_path / "old", pairs, is_turned=version != "0.21.2")
    edit_json(old / CONFIG, peft_version=version)
    prompt = prompt_of(20, 6)
    with mixtral.loaded({"present": present, "old": old}):
        assert_close(mixtral.llm.logits(prompt, adapter="old"), mixtral.llm.logits(prompt, adapter="present"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora does not go with"),
        ({"lora_bias": True}, "lora_bias does not go with"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights does not go with"),
        ({"use_rslora": True}, "use_rslora with .*experts.0.w1"),
        ({"alpha_pattern": {"w1": 3}}, "alpha_pattern has a value for .*experts.0.w1"),
        ({"target_parameters": ["embed_tokens.weight"]}, "target_parameters names model.embed_tokens.weight"),
        ({"modules_to_save": ["experts"]}, "modules_to_save covers modules whose weights are missing: .*mlp.experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_peft_cannot_do_to_experts_is_refused_by_name(
    changes: dict[str, Any], named: str, mixtral: World, tmp_path: Path
) -> None:
    pairs = _random_pairs(["block_sparse_moe.experts.0.w1"])
    adapter = _write(tmp_path / "adapter", pairs, target_modules=["w1"], **changes)
    with pytest.raises(AdapterError, match=named):
        mixtral.llm.load_adapter("adapter", adapter)
    assert not mixtral.llm.adapters


def test_experts_that_the_config_does_not_target_are_refused(mixtral: World, tmp_path: Path) -> None:
    pairs = _random_pairs(["block_sparse_moe.experts.0.w1"])
    with pytest.raises(AdapterIncompatible, match=r"experts\.0\.w1, which the config does not target"):
        mixtral.llm.load_adapter("adapter", _write(tmp_path / "w3", pairs, target_modules=["w3"]))
    stacked = _write_stacked(tmp_path / "stacked", pairs)
    edit_json(stacked / CONFIG, target_parameters=[ROUTER])
    with pytest.raises(AdapterUnsupported, match=r"mlp\.experts is not a linear layer, but has lora_A"):
        mixtral.llm.load_adapter("adapter", stacked)


def _random_pairs(modules: Sequence[str], seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """The modules in every layer, by full path."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in range(LAYERS):
        for module in modules:
            rows, columns = SHAPES[module.rpartition(".")[2]]
            lora_a = torch.randn(RANK, columns, generator=generator) / columns**0.5
            lora_b = torch.randn(rows, RANK, generator=generator) * 0.25
            pairs[f"model.layers.{layer}.{module}"] = (lora_a, lora_b)
    return pairs


def _write(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """An adapter that holds each module's factors under its own name. Scaling 1."""
    tensors = {}
    for path, (lora_a, lora_b) in pairs.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = lora_a
        tensors[f"base_model.model.{path}.lora_B.weight"] = lora_b
    return _save(folder, tensors, **config)


def _write_stacked(folder: Path, pairs: Pairs, *, is_turned: bool = False) -> Path:
    """The same deltas on the stacked parameters and the router. is_turned: in the layout up to PEFT 0.19.0."""
    tensors = {}
    kinds = {path.rpartition(".")[2] for path in pairs}
    stacks = [name for name, parts in STACKS.items() if kinds & set(parts)]
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.mlp"
        for depth, name in enumerate(reversed(stacks)):
            lora_a, lora_b = _stack(pairs, f"model.layers.{layer}.block_sparse_moe.experts", STACKS[name], is_turned)
            tensors[f"{prefix}.experts.{'base_layer.' * depth}lora_A.weight"] = lora_a
            tensors[f"{prefix}.experts.{'base_layer.' * depth}lora_B.weight"] = lora_b
        if "gate" in kinds:
            lora_a, lora_b = pairs[f"model.layers.{layer}.block_sparse_moe.gate"]
            tensors[f"{prefix}.gate.lora_A.weight"], tensors[f"{prefix}.gate.lora_B.weight"] = lora_a, lora_b
    return _save(
        folder,
        tensors,
        target_modules=[],
        target_parameters=[*stacks, *([ROUTER] if "gate" in kinds else [])],
        rank_pattern={"gate_up_proj": 2 * RANK},
        alpha_pattern={"gate_up_proj": 2 * RANK},
    )


def _stack(pairs: Pairs, experts: str, parts: Sequence[str], is_turned: bool) -> tuple[Tensor, Tensor]:
    """lora_A and lora_B of all experts: rows expert by expert, columns rank by rank."""
    lora_a, lora_b = [], []
    for expert in range(EXPERTS):
        absent = {part: (torch.zeros(RANK, SHAPES[part][1]), torch.zeros(SHAPES[part][0], RANK)) for part in parts}
        found = [pairs.get(f"{experts}.{expert}.{part}", absent[part]) for part in parts]
        expert_a = torch.cat([pair[0] for pair in found])
        expert_b: Tensor = torch.block_diag(*(pair[1] for pair in found))  # type: ignore[no-untyped-call]
        lora_a.append(expert_b.t() if is_turned else expert_a)
        lora_b.append(expert_a.t() if is_turned else expert_b)
    return torch.cat(lora_a).contiguous(), torch.stack(lora_b, dim=-1).flatten(1)


def _save(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": RANK,
        **config,
    }
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(dict(tensors), folder / WEIGHTS)
    return folder


def _prompts_by_visit(base: Path, expert: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that send a token to the expert in some layer, and prompts that do in none."""
    model = MixtralForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    visited: list[list[int]] = []
    unvisited: list[list[int]] = []
    for token in range(64):
        prompt = [token] * 3
        with torch.no_grad():
            router_logits = model(torch.tensor([prompt]), output_router_logits=True).router_logits
        chosen = torch.cat([logits.topk(2).indices for logits in router_logits])
        (visited if (chosen == expert).any() else unvisited).append(prompt)
    return visited[:3], unvisited[:3]
