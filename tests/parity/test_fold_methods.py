"""Methods that fold into an additive change of linear layers: the same logits and tokens as PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm import LLM
from graftlm.adapters import load_adapter
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import AdapterCorrupt, AdapterError, AdapterIncompatible, AdapterUnsupported
from graftlm.models.base_weights import CheckpointWeights
from tests import tiny
from tests.parity.method_rig import (
    BASES,
    Case,
    Expected,
    assert_adapter_is_peft,
    assert_batch_is_peft,
    make_adapters,
    make_bases,
)

pytestmark = [
    # PEFT has advice on projections that are not saved, takes tensors of rank zero for shards of a larger file, and
    # AdaLoRA's rank_pattern for LoRA's.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor.* invalid shape"),
]
ALL = tiny.ALL_PROJECTIONS
QUERY = "model.layers.0.self_attn.q_proj"
VALUE = "model.layers.1.self_attn.v_proj"

# name -> base, config class, config.
CASES: dict[str, Case] = {
    "adalora": ("untied", peft.AdaLoraConfig, {"init_r": 6, "lora_alpha": 20, "total_step": 10}),
    "adalora-pruned": (
        "biased",
        peft.AdaLoraConfig,
        {"init_r": 5, "total_step": 10, "target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "lora_only"},
    ),
    "adalora-without-alpha": (
        "untied",
        peft.AdaLoraConfig,
        {"init_r": 4, "lora_alpha": 0, "total_step": 10, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "vera": ("untied", peft.VeraConfig, {"r": 16}),
    "vera-all": ("biased", peft.VeraConfig, {"r": 8, "target_modules": ALL, "bias": "vera_only"}),
    "vera-drawn-anew": (
        "untied",
        peft.VeraConfig,
        {"r": 8, "target_modules": [*ALL, "lm_head"], "save_projection": False, "projection_prng_key": 77},
    ),
    "miss": ("untied", peft.MissConfig, {"r": 4, "target_modules": ALL}),
    "miss-with-a-short-shard": ("biased", peft.MissConfig, {"r": 7, "init_weights": False, "bias": "all"}),
    "miss-mini": ("untied", peft.MissConfig, {"r": 8, "mini_r": 4, "init_weights": "mini", "target_modules": ALL}),
    "miss-bat": (
        "biased",
        peft.MissConfig,
        {"r": 8, "init_weights": "bat", "target_modules": ALL, "bias": "MiSS_only"},
    ),
    "loha": ("untied", peft.LoHaConfig, {"r": 3, "alpha": 5, "target_modules": ALL, "rank_dropout": 0.5}),
    "loha-dense": (
        "biased",
        peft.LoHaConfig,
        {"r": 8, "use_effective_conv2d": True, "target_modules": ["q_proj", "up_proj"]},
    ),
    "loha-patterns": (
        "untied",
        peft.LoHaConfig,
        {
            "target_modules": r".*\.(q|v)_proj",
            "rank_pattern": {"v_proj": 2, "layers.0.self_attn.q_proj": 4},
            "alpha_pattern": {"q_proj": 3},
            "exclude_modules": ["layers.1.self_attn.q_proj"],
        },
    ),
    "lokr-second-factored": ("untied", peft.LoKrConfig, {"r": 2, "target_modules": ALL, "decompose_factor": 4}),
    "lokr-both-factored": (
        "biased",
        peft.LoKrConfig,
        {"r": 1, "alpha": 4, "target_modules": ALL, "decompose_both": True},
    ),
    "lokr-whole": (
        "untied",
        peft.LoKrConfig,
        {"r": 64, "alpha": 32, "target_modules": ["q_proj", "down_proj", "lm_head"]},
    ),
    "lokr-patterns": (
        "tied",
        peft.LoKrConfig,
        {"r": 2, "target_modules": ALL, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 1}},
    ),
    "delora": ("untied", peft.DeloraConfig, {"r": 4, "target_modules": ALL}),
    "delora-patterns": (
        "biased",
        peft.DeloraConfig,
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2},
            "lambda_pattern": {"down_proj": 3},
            "bias": "all",
            "modules_to_save": ["model.norm"],
        },
    ),
    "vblora": ("untied", peft.VBLoRAConfig, {"num_vectors": 24, "vector_length": 16, "topk": 3}),
    "vblora-short": (
        "biased",
        peft.VBLoRAConfig,
        {
            "num_vectors": 300,
            "vector_length": 32,
            "target_modules": ALL,
            "save_only_topk_weights": True,
            "bias": "vblora_only",
        },
    ),
    "vblora-one-vector-each": (
        "tied",
        peft.VBLoRAConfig,
        {"num_vectors": 24, "vector_length": 8, "topk": 1, "save_only_topk_weights": True},
    ),
    "gralora": ("untied", peft.GraloraConfig, {"r": 8, "gralora_k": 4, "target_modules": ALL}),
    "gralora-hybrid": (
        "biased",
        peft.GraloraConfig,
        {"r": 4, "hybrid_r": 3, "alpha": 12, "layers_to_transform": [1], "target_modules": ALL, "bias": "gralora_only"},
    ),
    "hira": ("untied", peft.HiraConfig, {"r": 4, "target_modules": ALL, "rank_pattern": {"v_proj": 2}}),
    "shira": ("untied", peft.ShiraConfig, {"r": 4, "target_modules": ALL, "random_seed": 3}),
    "fourierft": ("untied", peft.FourierFTConfig, {"n_frequency": 50, "n_frequency_pattern": {"v_proj": 20}}),
    "c3a": ("biased", peft.C3AConfig, {"block_size": 16, "block_size_pattern": {"v_proj": 32}, "bias": "all"}),
    "loha-head-beside-saved-modules": (
        "tied",
        peft.LoHaConfig,
        {"r": 2, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens", "k_proj"]},
    ),
}
# Which of the five ranks of "adalora-pruned" are left; the others keep all.
KEPT_RANKS = {QUERY: [True, False, True, False, False], VALUE: [False] * 5}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def folders(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(CASES, bases, tmp_path_factory.mktemp("adapters"), before_saving={"adalora-pruned": prune})


def prune(adapted: Any) -> None:
    every = [
        name for name, module in adapted.base_model.model.named_modules() if "lora_E" in dict(module.named_children())
    ]
    adapted.peft_config["default"].rank_pattern = {
        f"{name}.lora_E.default": KEPT_RANKS.get(name, [True] * 5) for name in every
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_peft(
    name: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    base = CASES[name][0]
    assert_adapter_is_peft(name, llms[base], expected[name], unadapted[base])


@pytest.mark.parametrize("base", BASES)
def test_adapters_of_all_methods_and_the_base_share_a_batch_without_touching_each_other(
    base: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    names = [name for name, case in CASES.items() if case[0] == base]
    assert_batch_is_peft(names, llms[base], expected, unadapted[base])


def test_the_smaller_of_factors_and_matrix_is_kept(
    llms: dict[str, LLM], bases: dict[str, Path], folders: dict[str, Path]
) -> None:
    ranks = {module.path: module.rank for module in llms["untied"].adapters["loha"].modules}
    assert ranks[QUERY] == 9
    for name, overrides in {"loha-dense": [1, 1, 1, 1], "lokr-both-factored": [0] * 8}.items():
        checkpoint = open_checkpoint(bases["biased"])
        loaded = load_adapter(name, folders[name], CheckpointWeights(checkpoint), max_bytes=1 << 30)
        checkpoint.close()
        assert [len(patch.overrides) for patch in loaded.weights.patch.linears.values()] == overrides


def test_a_module_pruned_to_rank_zero_is_bound_and_does_nothing(llms: dict[str, LLM]) -> None:
    adapter = llms["biased"].adapters["adalora-pruned"]
    ranks = {module.path: module.rank for module in adapter.modules}
    assert (ranks[QUERY], ranks[VALUE]) == (2, 0)
    assert adapter.bound == adapter.total


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("adalora", {"use_dora": True}, AdapterUnsupported, "use_dora"),
        ("adalora", {"trainable_token_indices": [1]}, AdapterUnsupported, "trainable_token_indices"),
        ("adalora", {"init_r": 7}, AdapterIncompatible, "lora_A"),
        ("adalora", {"rank_pattern": {QUERY: [True]}}, AdapterCorrupt, "rank_pattern"),
        ("adalora", {"rank_pattern": {f"{QUERY}s.lora_E": [True]}}, AdapterIncompatible, "rank_pattern"),
        ("vera", {"exclude_modules": ["v_proj"]}, AdapterUnsupported, "exclude_modules"),
        ("vera", {"r": 8}, AdapterIncompatible, "vera_A"),
        ("vera-drawn-anew", {"save_projection": True}, AdapterCorrupt, "vera_A"),
        ("vera-drawn-anew", {"projection_prng_key": 1 << 70}, AdapterCorrupt, "projection_prng_key"),
        ("miss", {"init_weights": "big"}, AdapterUnsupported, "init_weights"),
        ("miss", {"init_weights": "bat"}, AdapterIncompatible, "miss_block"),
        ("miss-mini", {"mini_r": 5}, AdapterIncompatible, "miss_block"),
        ("loha", {"bias": "all"}, AdapterUnsupported, "bias"),
        ("loha", {"r": 4}, AdapterIncompatible, "hada_w1_a"),
        ("loha", {"rank_pattern": {"(": 4}}, AdapterCorrupt, "rank_pattern"),
        ("lokr-second-factored", {"target_modules": ["q_proj"]}, AdapterIncompatible, "does not target"),
        # PEFT takes DeLoRA's own delora_w_norm for a module that this names.
        ("delora-patterns", {"modules_to_save": ["norms"]}, AdapterUnsupported, "model.norm.weight"),
        ("delora", {"bias": "some"}, AdapterCorrupt, "bias"),
        ("vblora", {"topk": 25}, AdapterCorrupt, "topk"),
        ("vblora", {"save_only_topk_weights": True}, AdapterCorrupt, "topk_weights"),
        ("vblora", {"vector_length": 8}, AdapterCorrupt, "vblora_vector_bank"),
        ("gralora", {"gralora_k": 3}, AdapterCorrupt, "gralora_k"),
        ("hira", {"target_modules": [*ALL, "embed_tokens"]}, AdapterUnsupported, "embed_tokens"),
        ("shira", {"layers_to_transform": [0]}, AdapterUnsupported, "layers_to_transform"),
        ("fourierft", {"random_loc_seed": "x"}, AdapterCorrupt, "random_loc_seed"),
        ("c3a", {"new_option": 1}, AdapterUnsupported, "new_option"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_name(
    name: str,
    changes: dict[str, Any],
    error: type[AdapterError],
    words: str,
    llms: dict[str, LLM],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    edited = shutil.copytree(folders[name], tmp_path / "edited")
    tiny.edit_json(edited / "adapter_config.json", **changes)
    with pytest.raises(error, match=words):
        llms[CASES[name][0]].load_adapter("edited", edited)


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [
        ("vblora-short", f"{QUERY}.vblora_logits_A_topk_indices", torch.full((4, 2, 2), 300, dtype=torch.int16)),
        ("shira", f"{QUERY}.shira_indices", torch.full((2, 512), 64, dtype=torch.int32)),
        ("miss", f"{QUERY}.miss_block", torch.zeros(4, 64, dtype=torch.int32)),
        ("lokr-whole", f"{QUERY}.lokr_w1", torch.zeros(())),
        ("lokr-whole", f"{QUERY}.lokr_w1", torch.zeros(4, 4)),
        ("c3a", f"{QUERY}.c3a_kernel", torch.zeros(4, 4, 8)),
        ("fourierft", f"{QUERY}.fourierft_spectrum", torch.zeros(5000)),
        ("loha", f"{QUERY}.hada_t1", torch.zeros(3, 3)),
    ],
)
def test_a_tensor_that_cannot_be_meant_is_refused_by_name(
    name: str, tensor: str, value: Tensor, llms: dict[str, LLM], folders: dict[str, Path], tmp_path: Path
) -> None:
    edited = shutil.copytree(folders[name], tmp_path / "edited")
    change_tensors(edited, {f"base_model.model.{tensor}": value})
    with pytest.raises(AdapterError, match=tensor.rpartition(".")[2]):
        llms[CASES[name][0]].load_adapter("edited", edited)


def change_tensors(folder: Path, changes: Mapping[str, Tensor]) -> None:
    weights = folder / "adapter_model.safetensors"
    save_file({**load_file(weights), **changes}, weights, metadata={"format": "pt"})
