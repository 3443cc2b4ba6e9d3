"""Which modules an adapter touches: PEFT's own choice, for every way of saying it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import LlamaForCausalLM

from graftlm.errors import AdapterIncompatible
from tests.parity.oracle import World, make_even_adapter
from tests.tiny import ALL_PROJECTIONS, edit_json


def test_each_target_alone_is_served_as_peft_does_and_all_of_them_mix(world: World, tmp_path: Path) -> None:
    adapters = {
        target: make_even_adapter(world.base, tmp_path / target, seed=seed, target_modules=[target])
        for seed, target in enumerate([*ALL_PROJECTIONS, "lm_head"], 1)
    }
    world.assert_parity(adapters)


PARTIAL: dict[str, dict[str, Any]] = {
    "v_only": {"target_modules": ["v_proj"]},
    "k_only": {"target_modules": ["k_proj"]},
    "gate_only": {"target_modules": ["gate_proj"]},
    "up_only": {"target_modules": ["up_proj"]},
    "q_and_v": {"target_modules": ["q_proj", "v_proj"]},
    "k_and_up": {"target_modules": ["k_proj", "up_proj"]},
    "other_ranks_for_q_and_v": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 3, "q_proj": 20}},
    "other_ranks_for_gate_and_up": {"target_modules": ["gate_proj", "up_proj"], "rank_pattern": {"up_proj": 2}},
    "q_of_layer_0_v_of_layer_1": {"target_modules": ["layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"]},
}


def test_r049_an_adapter_of_part_of_a_fused_group_leaves_the_rest_as_it_is(untied: World, tmp_path: Path) -> None:
    adapters = {
        name: make_even_adapter(untied.base, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(PARTIAL.items(), 1)
    }
    untied.assert_parity(adapters)


LAYERS = "model.layers"
SELECTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "name": ({"target_modules": ["q_proj"]}, 2),
    "parent_and_name": ({"target_modules": ["self_attn.q_proj"]}, 2),
    "layer_and_name": ({"target_modules": ["layers.1.self_attn.q_proj"]}, 1),
    "full_path": ({"target_modules": [f"{LAYERS}.0.mlp.down_proj", f"{LAYERS}.1.self_attn.k_proj"]}, 2),
    "all_linear": ({"target_modules": "all-linear"}, 14),
    "all_linear_in_capitals": ({"target_modules": "ALL-LINEAR"}, 14),
    "regex_with_alternation": ({"target_modules": r".*layers\.0.*\.(q_proj|v_proj)"}, 2),
    "regex_for_the_head": ({"target_modules": r"lm_head|.*\.0\..*down_proj"}, 2),
    "list_and_head": ({"target_modules": ["o_proj", "lm_head"]}, 3),
    "excluded_list": ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}, 3),
    "excluded_regex": ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*"}, 2),
    "all_linear_excluded": ({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}, 12),
    "layer_0": ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0}, 2),
    "layers_in_a_list": ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, 2),
    "no_restriction": ({"target_modules": ["q_proj"], "layers_to_transform": []}, 2),
    "layers_pattern": (
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        1,
    ),
    "layers_patterns": (
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks", "layers"]},
        1,
    ),
    "layer_and_head": ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0]}, 2),
    "layer_and_full_path": (
        {"target_modules": ["v_proj", f"{LAYERS}.1.self_attn.q_proj"], "layers_to_transform": [0]},
        2,
    ),
    "default": ({"target_modules": None}, 4),
}


@pytest.mark.parametrize(("config", "count"), SELECTIONS.values(), ids=SELECTIONS)
def test_r005_r006_targets_select_the_modules_peft_selects(
    config: dict[str, Any], count: int, untied: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(untied.base, tmp_path / "adapter", **config)
    # PEFT writes the expanded or reordered form: what the user asked for must mean the same.
    edit_json(adapter / "adapter_config.json", target_modules=config["target_modules"])
    reference = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(untied.base), adapter)
    chosen = set(reference.base_model.targeted_module_names)
    assert len(chosen) == count
    with untied.loaded({"adapter": adapter}):
        assert {module.path for module in untied.llm.adapters["adapter"].modules} == chosen
    untied.assert_parity({"adapter": adapter}, max_tokens=8)


@pytest.mark.parametrize(
    "targets", [["proj"], ["q_pro"], ["_proj"], ["elf_attn.q_proj"], [], "q_proj", ".*k_proj", "model"], ids=str
)
def test_r005_targets_that_match_nothing_of_the_weights_are_refused(
    targets: list[str] | str, untied: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(untied.base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_json(adapter / "adapter_config.json", target_modules=targets)
    with pytest.raises(
        AdapterIncompatible, match=r"model\.layers\.0\.self_attn\.q_proj, which the config does not target"
    ):
        untied.llm.load_adapter("adapter", adapter)
    assert not untied.llm.adapters


def test_r006_all_linear_leaves_the_head_out(world: World, tmp_path: Path) -> None:
    adapter = make_even_adapter(world.base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    edit_json(adapter / "adapter_config.json", target_modules="all-linear")
    with pytest.raises(AdapterIncompatible, match="lm_head, which the config does not target"):
        world.llm.load_adapter("adapter", adapter)


def test_weights_of_a_module_the_config_does_not_target_are_refused(untied: World, tmp_path: Path) -> None:
    adapter = make_even_adapter(untied.base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    edit_json(adapter / "adapter_config.json", target_modules=["v_proj"])
    with pytest.raises(AdapterIncompatible, match="q_proj"):
        untied.llm.load_adapter("adapter", adapter)
