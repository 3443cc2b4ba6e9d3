"""The LoRA part of PEFT's conformance matrix: each case an adapter as PEFT makes and saves it, random and loud.

Numbers in names are rows of the matrix. Whatever is in a file, PEFT's own reading of it over a fresh base is the truth.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import BdLoraConfig, KasaConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.parity.method_rig import make_biases_loud
from tests.tiny import ALL_PROJECTIONS, edit_json, make_llama

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
VOCAB = 259
INVOCATION = [17, 18]


@dataclass(frozen=True, kw_only=True)
class Case:
    """base: key of `make_bases`. config: of peft.LoraConfig. resize: vocabulary it is trained with. retrain: whether
    embedding and head were trained along. edit: changes to the saved folder.
    make: how it comes about, if not by one config."""

    base: str
    config: Mapping[str, Any] = field(default_factory=dict)
    resize: int | None = None
    retrain: bool = False
    edit: Callable[[Path], None] | None = None
    make: Callable[[Any, Path], Path] | None = None


def make_bases(folder: Path) -> dict[str, Path]:
    """tied, untied, and one with a bias, not zero, on every projection."""
    bases = {
        "untied": make_llama(folder / "untied"),
        "tied": make_llama(folder / "tied", tied=True, seed=1),
        "biased": make_llama(folder / "biased", attention_bias=True, mlp_bias=True, seed=2),
    }
    torch.manual_seed(3)
    make_biases_loud(bases["biased"])
    return bases


def open_base(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change a safetensors file in place."""
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path, metadata={"format": "pt"})


def randomise(model: Any, seed: int) -> None:
    """Every parameter that is trained gets loud values; those of a magnitude stay positive, as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if not parameter.requires_grad:
                continue
            if "magnitude" in name:
                parameter.mul_(noise.abs() + 0.5)
            elif any(part in name for part in ("lora_B", "lora_embedding_A", "lora_diag")):
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_((0.1 if "lora_A" in name or "lora_embedding_B" in name else 0.3) * noise)


def make_case(name: str, case: Case, base: Any, folder: Path) -> Path:
    """Have PEFT make and save an adapter, with its default options. `base` is used up."""
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    if case.resize is not None:
        base.resize_token_embeddings(case.resize, mean_resizing=False)
    if case.retrain:
        with torch.no_grad():
            for module in {base.get_input_embeddings(), base.get_output_embeddings()}:
                module.weight.add_(0.1 * torch.randn_like(module.weight))
    if case.make is not None:
        folder = case.make(base, folder)
    else:
        model = peft.get_peft_model(base, lora_config(**copy.deepcopy(dict(case.config))))
        randomise(model, seed)
        model.save_pretrained(folder)
    if case.edit is not None:
        case.edit(folder)
    return folder


def reload(base: Any, folder: Path, resize: int | None) -> Any:
    """PEFT's reading of an adapter over a fresh base, which is used up."""
    if resize is not None:
        base.resize_token_embeddings(resize, mean_resizing=False)
    return peft.PeftModel.from_pretrained(base, folder).eval()


def lora_config(**config: Any) -> peft.LoraConfig:
    defaults: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**defaults, **config})


def role_of(name: str) -> str:
    """The last words of a tensor's name, which say what it is, and which end of the model it belongs to."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.startswith(("lora_", "token_adapter"))), None)
    if first is None:
        first = next((i for i, part in enumerate(parts) if part in ("base_layer", "modules_to_save")), len(parts) - 1)
    ends = [end for end in ("embed_tokens", "lm_head", "norm") if any(part.endswith(end) for part in parts)]
    return ".".join([*ends, *parts[first:]])


def weighted(combination: str, **config: Any) -> Callable[[Any, Path], Path]:
    """Two adapters combined by PEFT to a third, which is saved alone."""

    def make(base: Any, folder: Path) -> Path:
        model = peft.get_peft_model(base, lora_config(**config))
        model.add_adapter("other", lora_config(**config))
        model.set_requires_grad("other")
        randomise(model, zlib.crc32(combination.encode()))
        model.add_weighted_adapter(["default", "other"], [0.7, 0.6], "combined", combination_type=combination)
        model.save_pretrained(folder, selected_adapters=["combined"])
        return folder / "combined"

    return make


def edit_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / CONFIG, **changes)


def edit_weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / WEIGHTS, change)


def to_pickle(folder: Path) -> None:
    weights = folder / WEIGHTS
    torch.save({name: t.half() for name, t in load_file(weights).items()}, folder / PICKLE)
    weights.unlink()


def keep_five_keys(folder: Path) -> None:
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "task_type")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({key: config[key] for key in kept}))


BD = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2, match_strict=False)
EMBED_HEAD = ["embed_tokens", "lm_head"]
ALL_AND_ENDS = [*ALL_PROJECTIONS, *EMBED_HEAD]
NULLS = dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "use_qalora"))

CASES: dict[str, Case] = {
    "01_query_value": Case(base="tied"),
    "02_rank_4": Case(base="untied", config={"r": 4, "target_modules": ALL_PROJECTIONS}),
    "02_rank_8": Case(base="untied", config={"r": 8, "target_modules": ALL_PROJECTIONS}),
    "02_rank_64": Case(base="untied", config={"r": 64, "target_modules": ALL_PROJECTIONS}),
    "03_rslora": Case(base="untied", config={"use_rslora": True}),
    "04_rank_pattern": Case(
        base="untied",
        config={
            "target_modules": ALL_PROJECTIONS,
            "rank_pattern": {"(q|k)_proj": 3, r"layers\.[1-9]\.mlp\..*": 16, "^model.layers.0.self_attn.o_proj": 5},
        },
    ),
    "05_alpha_pattern": Case(
        base="untied", config={"alpha_pattern": {"q_proj": 2, r"layers\.1\..*q_proj": 64, r"layers.0.*v_proj": 40}}
    ),
    "07_alpha_zero": Case(base="untied", config={"alpha_pattern": {r"layers\.0\..*": 0}}),
    "07_alpha_negative": Case(base="tied", config={"lora_alpha": -12}),
    "07_alpha_fraction": Case(base="tied", config={"lora_alpha": 2.5, "use_rslora": True}),
    "08_dropout": Case(base="tied", config={"lora_dropout": 0.3}),
    "09_regex_and_exclude": Case(
        base="untied",
        config={"target_modules": r".*\.(q|k|up)_proj", "exclude_modules": r"model\.layers\.0\..*k_proj"},
    ),
    "09_exclude_list": Case(
        base="untied", config={"target_modules": ALL_PROJECTIONS, "exclude_modules": ["layers.0.mlp.up_proj", "q_proj"]}
    ),
    "10_all_linear": Case(
        base="biased", config={"target_modules": "all-linear"}, edit=edit_config(target_modules="all-linear")
    ),
    "11_default_targets": Case(base="untied", edit=edit_config(target_modules=None)),
    "12_full_names": Case(
        base="untied",
        config={"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]},
    ),
    "13_layer_0": Case(base="untied", config={"target_modules": ALL_PROJECTIONS, "layers_to_transform": 0}),
    "13_layers_and_pattern": Case(
        base="untied",
        config={
            "target_modules": ALL_PROJECTIONS,
            "layers_to_transform": [1, 5],
            "layers_pattern": ["blocks", "layers"],
        },
    ),
    "14_layers_and_ends": Case(
        base="untied",
        config={
            "target_modules": [*EMBED_HEAD, "q_proj", "model.layers.0.self_attn.v_proj"],
            "layers_to_transform": [1],
        },
    ),
    "16_layers_missing": Case(
        base="untied",
        edit=edit_weights(lambda tensors: {name: t for name, t in tensors.items() if ".layers.1." in name}),
    ),
    "17_five_keys": Case(base="tied", edit=keep_five_keys),
    "17_nulls": Case(base="tied", edit=edit_config(**NULLS, made_up=None, other_made_up={})),
    "18_pickle": Case(base="tied", edit=to_pickle),
    "18_both_files": Case(base="tied", edit=lambda folder: (folder / PICKLE).write_bytes(b"not a pickle") and None),
    "19_bf16": Case(
        base="untied",
        config={"target_modules": ALL_PROJECTIONS},
        edit=edit_weights(lambda tensors: {name: t.bfloat16() for name, t in tensors.items()}),
    ),
    "20_adapter_name": Case(
        base="untied",
        edit=edit_weights(lambda ts: {name.replace(".weight", ".default.weight"): t for name, t in ts.items()}),
    ),
    "47_dora": Case(base="untied", config={"use_dora": True, "target_modules": ALL_PROJECTIONS}),
    "47_dora_biased": Case(base="biased", config={"use_dora": True, "target_modules": ALL_PROJECTIONS}),
    "47_dora_default_name": Case(
        base="untied",
        config={"use_dora": True},
        edit=edit_weights(
            lambda ts: {(f"{name}.default.weight" if name.endswith("vector") else name): t for name, t in ts.items()}
        ),
    ),
    "49_dora_ends_rslora": Case(
        base="untied", config={"use_dora": True, "use_rslora": True, "target_modules": [*EMBED_HEAD, "q_proj"]}
    ),
    "49_dora_ends_tied": Case(base="tied", config={"use_dora": True, "target_modules": EMBED_HEAD}),
    "52_bias_all": Case(base="biased", config={"bias": "all"}),
    "52_bias_all_dora": Case(base="biased", config={"bias": "all", "use_dora": True}),
    "52_bias_all_saved_module": Case(base="biased", config={"bias": "all", "modules_to_save": ["k_proj"]}),
    "53_bias_lora_only": Case(base="biased", config={"bias": "lora_only", "target_modules": ALL_PROJECTIONS}),
    "55_lora_bias": Case(base="untied", config={"lora_bias": True, "target_modules": ALL_PROJECTIONS}),
    "55_lora_bias_head": Case(base="untied", config={"lora_bias": True, "target_modules": ["lm_head"]}),
    "55_lora_bias_biased": Case(base="biased", config={"lora_bias": True, "bias": "all"}),
    "56_saved_head": Case(base="untied", config={"modules_to_save": ["lm_head"]}),
    "56_saved_head_tied": Case(base="tied", config={"modules_to_save": ["lm_head"]}),
    "57_saved_embedding_tied": Case(base="tied", config={"modules_to_save": ["embed_tokens"]}),
    "57_saved_embedding": Case(base="untied", config={"modules_to_save": ["embed_tokens"]}),
    "57_saved_embedding_low_rank_head": Case(
        base="tied", config={"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head", "q_proj"]}
    ),
    "58_saved_ends": Case(base="untied", config={"modules_to_save": EMBED_HEAD}),
    "58_saved_ends_ensured": Case(base="tied", config={"modules_to_save": EMBED_HEAD, "ensure_weight_tying": True}),
    "59_saved_norms": Case(base="untied", config={"modules_to_save": ["norm"]}),
    "59_saved_mlp": Case(base="biased", config={"modules_to_save": ["mlp"]}),
    "59_saved_projection": Case(
        base="biased", config={"modules_to_save": ["k_proj"], "target_modules": ["q_proj", "k_proj"]}
    ),
    "60_embedding": Case(base="untied", config={"target_modules": ["embed_tokens", "k_proj"]}),
    "60_embedding_tied": Case(base="tied", config={"target_modules": ["embed_tokens", "k_proj"]}),
    "60_head_tied": Case(base="tied", config={"target_modules": ["lm_head"]}),
    "60_ends_tied": Case(base="tied", config={"target_modules": EMBED_HEAD}),
    "60_ends_ensured": Case(base="tied", config={"target_modules": EMBED_HEAD, "ensure_weight_tying": True}),
    "61_tokens_tied": Case(base="tied", config={"trainable_token_indices": [9, 5, 200]}),
    "61_tokens": Case(base="untied", config={"trainable_token_indices": [9, 5, 200]}),
    "61_tokens_both_ends": Case(
        base="untied", config={"trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [7, 200]}}
    ),
    "61_tokens_both_ends_tied": Case(
        base="tied", config={"trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [7, 200]}}
    ),
    "61_tokens_same_tied": Case(
        base="tied", config={"trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [9, 5]}}
    ),
    "61_tokens_head_tied": Case(base="tied", config={"trainable_token_indices": {"lm_head": [9, 5]}}),
    "61_tokens_dora_bias": Case(
        base="biased", config={"trainable_token_indices": [9, 200], "use_dora": True, "bias": "lora_only"}
    ),
    "62_grown": Case(base="untied", resize=300),
    "62_grown_tied": Case(base="tied", resize=300),
    "62_grown_trained": Case(base="untied", resize=261, retrain=True),
    "62_grown_trained_tied": Case(base="tied", resize=261, retrain=True),
    "62_shrunk": Case(base="untied", resize=250),
    "62_shrunk_head": Case(base="untied", resize=250, config={"target_modules": ["lm_head"], "use_dora": True}),
    "62_grown_ends": Case(base="untied", config={"target_modules": [*EMBED_HEAD, "q_proj"]}, resize=300),
    "62_grown_ends_tied": Case(base="tied", config={"target_modules": [*EMBED_HEAD, "q_proj"]}, resize=300),
    "62_grown_head_tied": Case(base="tied", config={"target_modules": ["lm_head"]}, resize=270, retrain=True),
    "62_grown_embedding_tied": Case(base="tied", config={"target_modules": ["embed_tokens"]}, resize=270, retrain=True),
    "62_shrunk_embedding": Case(base="untied", resize=250, config={"target_modules": ["embed_tokens"]}),
    "62_grown_dora": Case(base="untied", config={"target_modules": EMBED_HEAD, "use_dora": True}, resize=270),
    "62_grown_rslora": Case(
        base="untied", config={"target_modules": EMBED_HEAD, "bias": "all", "use_rslora": True}, resize=270
    ),
    "63_grown_saved": Case(base="untied", config={"modules_to_save": EMBED_HEAD}, resize=300),
    "63_grown_saved_ensured": Case(
        base="tied",
        config={"modules_to_save": EMBED_HEAD, "ensure_weight_tying": True},
        resize=270,
        retrain=True,
    ),
    "63_grown_saved_embedding_tied": Case(
        base="tied", config={"modules_to_save": ["embed_tokens"]}, resize=270, retrain=True
    ),
    "65_alora_grown_ends": Case(
        base="untied",
        config={
            "alora_invocation_tokens": INVOCATION,
            "target_modules": ["lm_head", "q_proj"],
            "modules_to_save": ["embed_tokens"],
        },
        resize=270,
    ),
    "63_grown_tokens_tied": Case(base="tied", config={"trainable_token_indices": [259, 5, 299]}, resize=300),
    "63_grown_tokens": Case(base="untied", config={"trainable_token_indices": [259, 5, 299]}, resize=300),
    "64_replicated": Case(
        base="untied", config={"layer_replication": [[0, 2], [0, 1]], "target_modules": ALL_PROJECTIONS}
    ),
    "64_replicated_grown_tied": Case(
        base="tied", config={"layer_replication": [[1, 2]] * 3, "use_dora": True}, resize=270, retrain=True
    ),
    "64_replicated_biased": Case(base="biased", config={"layer_replication": [[1, 2]], "bias": "all"}),
    "65_alora": Case(base="untied", config={"alora_invocation_tokens": INVOCATION, "target_modules": ALL_PROJECTIONS}),
    "65_alora_lora_bias": Case(base="untied", config={"alora_invocation_tokens": INVOCATION, "lora_bias": True}),
    "65_alora_with_all": Case(
        base="biased",
        config={
            "alora_invocation_tokens": INVOCATION,
            "modules_to_save": ["norm", "lm_head"],
            "trainable_token_indices": [9, 40],
            "bias": "all",
        },
    ),
    "65_alora_grown": Case(base="tied", config={"alora_invocation_tokens": [17, 260]}, resize=261, retrain=True),
    "67_pissa": Case(base="untied", config={"init_lora_weights": "pissa", "target_modules": ALL_PROJECTIONS}),
    "67_pissa_dora": Case(base="untied", config={"init_lora_weights": "pissa", "use_dora": True}),
    "67_pissa_rslora_biased": Case(
        base="biased", config={"init_lora_weights": "pissa", "use_rslora": True, "bias": "all"}
    ),
    "67_olora": Case(base="untied", config={"init_lora_weights": "olora", "target_modules": ALL_PROJECTIONS}),
    "67_olora_rank_pattern": Case(
        base="untied", config={"init_lora_weights": "olora", "rank_pattern": {"q_proj": 3}, "use_rslora": True}
    ),
    "67_pissa_head": Case(
        base="untied", config={"init_lora_weights": "pissa", "target_modules": ["lm_head", "q_proj"]}
    ),
    "67_olora_head_tied": Case(base="tied", config={"init_lora_weights": "olora", "target_modules": ["lm_head"]}),
    "67_mica": Case(base="untied", config={"init_lora_weights": "mica"}),
    "67_orthogonal": Case(base="untied", config={"init_lora_weights": "orthogonal"}),
    "69_cat": Case(base="untied", make=weighted("cat", use_rslora=True)),
    "69_linear": Case(base="untied", make=weighted("linear", use_rslora=True)),
    "70_block_diagonal": Case(
        base="untied", config={"use_bdlora": BD, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    ),
    "70_kasa": Case(base="untied", config={"kasa_config": KasaConfig()}),
    "70_velora": Case(base="untied", config={"velora_config": peft.tuners.lora.VeloraConfig()}),
    "70_monteclora": Case(base="untied", config={"monteclora_config": peft.tuners.lora.MontecloraConfig()}),
    "73_qalora": Case(base="untied", config={"use_qalora": True}),
}
