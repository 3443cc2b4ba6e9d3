"""alpha, rank and their patterns: the factor in front of every update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from graftlm.errors import AdapterCorrupt
from tests.parity.oracle import World, greedy, make_even_adapter, prompt_of
from tests.tiny import ALL_PROJECTIONS, edit_json

R007 = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ALL_PROJECTIONS,
    "rank_pattern": {"v_proj": 4, r"layers.1.\w+.up_proj": 16},
    "alpha_pattern": {"v_proj": 32},
}


@pytest.mark.parametrize("use_rslora", [False, True], ids=["lora", "rslora"])
def test_r007_rank_and_alpha_of_a_module_come_each_from_its_own_pattern(
    use_rslora: bool, untied: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(untied.base, tmp_path / "adapter", use_rslora=use_rslora, **R007)
    with untied.loaded({"adapter": adapter}):
        modules = {module.path: module for module in untied.llm.adapters["adapter"].modules}
    assert len(modules) == 14
    for path, module in modules.items():
        rank = 4 if "v_proj" in path else 16 if "1.mlp.up_proj" in path else 8
        alpha = 32 if "v_proj" in path else 16
        assert module.rank == rank, path
        assert module.scaling == pytest.approx(alpha / (math.sqrt(rank) if use_rslora else rank)), path
    untied.assert_parity({"adapter": adapter})


@pytest.mark.parametrize("use_rslora", [False, True], ids=["lora", "rslora"])
def test_r036_every_rank_and_alpha_gives_64_tokens_of_peft(use_rslora: bool, untied: World, tmp_path: Path) -> None:
    targets = {"attention": ["q_proj", "v_proj"], "mlp": ["up_proj", "down_proj"], "all": ALL_PROJECTIONS}
    adapters = {
        f"{kind}-{r}-{alpha}": make_even_adapter(
            untied.base,
            tmp_path / f"{kind}-{r}-{alpha}",
            r=r,
            lora_alpha=alpha,
            use_rslora=use_rslora,
            target_modules=names,
        )
        for kind, names in targets.items()
        for r in (4, 16)
        for alpha in (8, 64)
    }
    untied.assert_parity(adapters, max_tokens=64)


PATTERNS: dict[str, dict[str, Any]] = {
    "anchored_at_the_end": {"alpha_pattern": {"q_pro": 64, "proj": 64, "q_proj.": 64}},
    "start_anchor": {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 64, "^self_attn.v_proj": 64}},
    "index_class": {"alpha_pattern": {r"layers\.(0|2)\..*v_proj": 64}},
    "top_level_name": {"target_modules": ["q_proj", "lm_head"], "alpha_pattern": {"lm_head": 48}},
    "rank_only": {"rank_pattern": {r".*\.1\.self_attn\.q_proj": 24}},
    "zero_alpha_for_one": {"alpha_pattern": {"q_proj": 0}},
    "other_alpha_and_rank_keys": {"rank_pattern": {"self_attn.q_proj": 2}, "alpha_pattern": {"0.self_attn.q_proj": 6}},
    "float_alpha": {"lora_alpha": 2.5},
    "negative_alpha": {"lora_alpha": -16},
    "rank_17_rslora": {"r": 17, "use_rslora": True, "rank_pattern": {"v_proj": 3}},
    "dropout": {"lora_dropout": 0.3},
    "gaussian": {"init_lora_weights": "gaussian"},
    "fan_in_fan_out_null": {},
}


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match:RuntimeWarning")
def test_r007_patterns_and_alphas_of_every_kind_mix_in_one_batch(untied: World, tmp_path: Path) -> None:
    adapters = {
        name: make_even_adapter(untied.base, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(PATTERNS.items(), 1)
    }
    edit_json(adapters["fan_in_fan_out_null"] / "adapter_config.json", fan_in_fan_out=None)
    untied.assert_parity(adapters, max_tokens=16)


def test_of_overlapping_patterns_the_first_in_the_file_counts(untied: World, tmp_path: Path) -> None:
    first = make_even_adapter(untied.base, tmp_path / "first")
    edit_json(first / "adapter_config.json", alpha_pattern={r".*v_proj": 4, "v_proj": 64})
    second = make_even_adapter(untied.base, tmp_path / "second")
    edit_json(second / "adapter_config.json", alpha_pattern={"v_proj": 64, r".*v_proj": 4})
    assert [*json.loads((second / "adapter_config.json").read_text())["alpha_pattern"]] == ["v_proj", ".*v_proj"]
    with untied.loaded({"first": first, "second": second}):
        scalings = [
            {module.scaling for module in adapter.modules if "v_proj" in module.path}
            for adapter in untied.llm.adapters.values()
        ]
    assert scalings == [{0.5}, {8.0}]
    untied.assert_parity({"first": first, "second": second})


def test_an_alpha_of_zero_is_the_base(untied: World, tmp_path: Path) -> None:
    silent = make_even_adapter(untied.base, tmp_path / "silent", lora_alpha=0)
    prompt = prompt_of(20, 4)
    with untied.loaded({"silent": silent}):
        assert untied.llm.logits(prompt, adapter="silent").equal(untied.llm.logits(prompt))
    untied.assert_parity({"silent": silent}, loud=False)


def test_r013_the_rslora_flag_changes_scale_and_tokens(untied: World, tmp_path: Path) -> None:
    marked = make_even_adapter(untied.base, tmp_path / "marked", r=16, lora_alpha=16, use_rslora=True)
    plain = make_even_adapter(untied.base, tmp_path / "plain", r=16, lora_alpha=16, use_rslora=True)
    edit_json(plain / "adapter_config.json", use_rslora=False)
    adapters = {"marked": marked, "plain": plain}
    prompt = prompt_of(30, 5)
    with untied.loaded(adapters):
        assert [adapter.modules[0].scaling for adapter in untied.llm.adapters.values()] == [4.0, 1.0]
        assert [adapter.method for adapter in untied.llm.adapters.values()] == ["rsLoRA", "LoRA"]
        one, other = greedy(untied.llm, [("marked", prompt), ("plain", prompt)], 16)
    assert one != other
    untied.assert_parity(adapters)


def test_a_rank_that_differs_between_config_and_weights_is_refused_with_both_numbers(
    untied: World, tmp_path: Path
) -> None:
    adapter = make_even_adapter(untied.base, tmp_path / "adapter", r=8)
    edit_json(adapter / "adapter_config.json", rank_pattern={"v_proj": 4})
    with pytest.raises(AdapterCorrupt, match=r"rank of model\.layers\.0\.self_attn\.v_proj.*8 in the weights, 4 in"):
        untied.llm.load_adapter("adapter", adapter)
