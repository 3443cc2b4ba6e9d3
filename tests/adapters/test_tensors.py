"""The tensors in the file: their names, halves, shapes and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from graftlm import LLM
from graftlm.errors import AdapterCorrupt, AdapterError, AdapterIncompatible, AdapterUnsupported
from tests.adapters.conftest import PROMPT
from tests.parity.oracle import Oracle, assert_close, make_even_adapter
from tests.tiny import ALL_PROJECTIONS, edit_json

PREFIX = "base_model.model."
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def rewrite(adapter: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load(path.read_bytes())), path)
    return adapter


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


SPELLINGS: dict[str, Callable[[str], str]] = {
    "adapter_name": lambda name: name.replace(".weight", ".default.weight"),
    "other_adapter_name": lambda name: name.replace(".weight", ".my-adapter.weight"),
    "no_prefix": lambda name: name.removeprefix(PREFIX),
    "one_model_short": lambda name: name.replace("base_model.model.model.", "base_model.model."),
    "two_models_short": lambda name: name.replace("base_model.model.model.layers", "base_model.layers"),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled_inside": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "data_parallel": lambda name: f"module.{name}",
    "fsdp": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "checkpointing": lambda name: name.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
    "double_prefix": lambda name: PREFIX + name,
    "language_model": lambda name: name.replace("model.layers", "model.language_model.layers"),
    "language_model_outside": lambda name: name.replace("model.model.layers", "model.language_model.model.layers"),
    "everything": lambda name: (
        f"module._orig_mod.{name.replace('.self_attn', '._checkpoint_wrapped_module.self_attn')}".replace(
            ".weight", ".default.weight"
        )
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_r009_r011_names_as_trainers_write_them_mean_the_same_adapter(
    spelling: Callable[[str], str], llm: LLM, oracle: Oracle, good: Path, copy: Callable[..., Path]
) -> None:
    adapter = llm.load_adapter("a", rewrite(copy(), renamed(spelling)))
    try:
        assert (adapter.bound, adapter.total) == (8, 8)
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, good))
    finally:
        llm.unload_adapter("a")


FOREIGN: dict[str, Callable[[str], str]] = {
    "gpt2": lambda name: name.replace("model.layers", "transformer.h"),
    "vision": lambda name: name.replace("model.layers", "vision_tower.layers"),
    "one_layer_too_far": lambda name: name.replace("layers.1.", "layers.2."),
    "negative_layer": lambda name: name.replace("layers.1.", "layers.-1."),
    "padded_layer": lambda name: name.replace("layers.1.", "layers.01."),
    "capitals": lambda name: name.replace("q_proj", "Q_proj"),
    "dots": lambda name: name.replace("self_attn", "self..attn"),
}


@pytest.mark.parametrize("spelling", FOREIGN.values(), ids=FOREIGN)
def test_r011_names_of_another_model_are_refused_and_never_served_as_the_base(
    spelling: Callable[[str], str], copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(rewrite(copy(), renamed(spelling)), AdapterIncompatible, r"of 8 tensors name no module of this base: base")


# Tensors that a plain LoRA config gives no meaning to.
MEANINGLESS: dict[str, tuple[str, type[AdapterError], str]] = {
    "dora": (f"{Q0}.lora_magnitude_vector", AdapterUnsupported, "no meaning for this adapter"),
    "dora_with_name": (f"{Q0}.lora_magnitude_vector.default.weight", AdapterUnsupported, "no meaning"),
    "lora_bias": (f"{Q0}.lora_B.bias", AdapterUnsupported, "no meaning"),
    "bias": (f"{Q0}.base_layer.bias", AdapterUnsupported, "no meaning"),
    "saved_module": (f"{PREFIX}lm_head.weight", AdapterIncompatible, "lm_head has another shape"),
    "saved_norm": (f"{PREFIX}model.norm.weight", AdapterUnsupported, "no meaning"),
    "embedding": (f"{PREFIX}model.embed_tokens.lora_embedding_A", AdapterIncompatible, "config does not target"),
    "trained_tokens": (
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta",
        AdapterCorrupt,
        "token rows that trainable_token_indices does not name",
    ),
    "inside_base_layer": (f"{Q0}.base_layer.lora_A.weight", AdapterUnsupported, "no meaning"),
    "ia3": (f"{Q0}.ia3_l", AdapterUnsupported, "no meaning"),
    "kohya": ("lora_unet_down.lora_down.weight", AdapterIncompatible, "name no module of this base"),
    "prompt": ("prompt_embeddings", AdapterUnsupported, "no meaning"),
    "diagonal": (f"{Q0}.lora_diag", AdapterUnsupported, "no meaning"),
    "adalora": (f"{Q0}.lora_E", AdapterUnsupported, "no meaning"),
}


@pytest.mark.parametrize(("name", "error", "match"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_r014_a_tensor_without_a_meaning_for_the_config_refuses_the_adapter(
    name: str, error: type[AdapterError], match: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(rewrite(copy(), lambda tensors: {**tensors, name: torch.ones(64)}), error, match)


@pytest.mark.parametrize(
    "name", ["x" * 10_000, "a\nb", "\x1b[31mred", "a\0b"], ids=["long", "newline", "escape", "nul"]
)
def test_a_tensor_name_that_would_spoil_messages_is_refused(
    name: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    adapter = rewrite(copy(), lambda tensors: {**tensors, name: torch.ones(64)})
    assert refuse(adapter, AdapterCorrupt, "has a tensor name that cannot be one").isprintable()


@pytest.mark.parametrize("module", ["model.norm", "model.layers.0.input_layernorm", "model.embed_tokens"])
def test_a_pair_on_a_module_that_is_not_linear_is_refused_by_name(
    module: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    pair = {f"{PREFIX}{module}.lora_A.weight": torch.ones(8, 64), f"{PREFIX}{module}.lora_B.weight": torch.ones(64, 8)}
    refuse(rewrite(copy(), lambda tensors: {**tensors, **pair}), AdapterUnsupported, f"{module} is not a linear layer")


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_r009_r051_a_missing_half_is_named(half: str, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    adapter = rewrite(copy(), lambda tensors: {name: t for name, t in tensors.items() if name != f"{Q0}.{half}.weight"})
    refuse(adapter, AdapterCorrupt, rf"{half} of model\.layers\.0\.self_attn\.q_proj is missing")


def test_a_half_that_is_there_twice_is_refused(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    adapter = rewrite(copy(), lambda tensors: {**tensors, f"{Q0}.lora_A.other.weight": torch.ones(8, 64)})
    refuse(adapter, AdapterCorrupt, r"two tensors are lora_A.weight of model\.layers\.0\.self_attn\.q_proj")


def test_targets_without_tensors_stay_as_the_base_has_them_as_in_peft(
    llm: LLM, oracle: Oracle, copy: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = rewrite(copy(), lambda tensors: {name: t for name, t in tensors.items() if "layers.0" in name})
    with caplog.at_level("WARNING", logger="graftlm"):
        loaded = llm.load_adapter("a", adapter)
    try:
        assert [module.path for module in loaded.modules] == [
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.v_proj",
        ]
        assert "no tensors for 2 targeted modules: model.layers.1.self_attn.q_proj" in caplog.text
    finally:
        llm.unload_adapter("a")


VALUES = {"nan": float("nan"), "inf": float("inf"), "minus_inf": -float("inf")}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_r051_values_that_are_not_finite_are_refused_by_tensor(
    value: float, dtype: torch.dtype, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        spoiled = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        spoiled[f"{Q0}.lora_B.weight"][-1, -1] = value
        return spoiled

    refuse(rewrite(copy(), spoil), AdapterCorrupt, rf"{Q0}\.lora_B\.weight holds NaN or infinity")


def test_values_that_overflow_with_their_scaling_are_refused(
    copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(lora_alpha=1e300), AdapterCorrupt, r"lora_B of model\.layers\.0\.self_attn\.q_proj times its scaling")


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], type[AdapterError], str]] = {
    "rank_0": ((0, 64), (64, 0), AdapterCorrupt, "rank at least 1"),
    "empty_shard": ((0,), (0,), AdapterCorrupt, "incomplete shard"),
    "flat": ((512,), (512,), AdapterCorrupt, "do not form a pair"),
    "scalar": ((), (), AdapterCorrupt, "do not form a pair"),
    "three_dimensions": ((1, 8, 64), (1, 64, 8), AdapterCorrupt, "do not form a pair"),
    "other_ranks": ((8, 64), (64, 4), AdapterCorrupt, "do not form a pair"),
    "transposed": ((64, 8), (8, 64), AdapterIncompatible, "another shape in this base"),
    "swapped": ((64, 8), (8, 64), AdapterIncompatible, "another shape in this base"),
    "narrow_input": ((8, 32), (64, 8), AdapterIncompatible, r"lora_A \[rank, 64\]"),
    "narrow_output": ((8, 64), (32, 8), AdapterIncompatible, r"lora_B \[64, rank\]"),
    "larger_rank": ((64, 64), (64, 64), AdapterCorrupt, "64 in the weights, 8 in adapter_config"),
    "smaller_rank": ((4, 64), (64, 4), AdapterCorrupt, "4 in the weights, 8 in adapter_config"),
}


@pytest.mark.parametrize(("a", "b", "error", "match"), SHAPES.values(), ids=SHAPES)
def test_r051_r101_shapes_that_do_not_fit_are_refused_with_both_sides(
    a: tuple[int, ...],
    b: tuple[int, ...],
    error: type[AdapterError],
    match: str,
    copy: Callable[..., Path],
    refuse: Callable[..., str],
) -> None:
    pair = {f"{Q0}.lora_A.weight": torch.ones(a), f"{Q0}.lora_B.weight": torch.ones(b)}
    refuse(rewrite(copy(), lambda tensors: {**tensors, **pair}), error, rf"layers\.0\.self_attn\.q_proj.*{match}")


@pytest.mark.parametrize("changes", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}], ids=["rank", "pattern"])
def test_r101_a_huge_declared_rank_is_refused_with_both_numbers_and_takes_no_memory(
    changes: dict[str, object], copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(**changes), AdapterCorrupt, "8 in the weights, 1000000000 in")


def test_r014_the_flag_removed_the_tensors_still_refuse(
    llama: Path, refuse: Callable[..., str], tmp_path: Path
) -> None:
    dora = make_even_adapter(llama, tmp_path / "dora", use_dora=True)
    edit_json(dora / "adapter_config.json", use_dora=False)
    refuse(dora, AdapterUnsupported, "lora_magnitude_vector")


def test_the_digest_is_of_the_content_and_the_name_is_a_label(
    llm: LLM, good: Path, copy: Callable[..., Path], llama: Path, tmp_path: Path
) -> None:
    paths = {
        "good": good,
        "copy": copy(),
        "config": copy("config", lora_alpha=17),
        "weights": rewrite(copy("weights"), lambda tensors: {name: 2 * t for name, t in tensors.items()}),
        "all": make_even_adapter(llama, tmp_path / "all", r=4, target_modules=[*ALL_PROJECTIONS, "lm_head"]),
    }
    loaded = {name: llm.load_adapter(name, path) for name, path in paths.items()}
    try:
        assert loaded["good"].digest == loaded["copy"].digest
        assert len({adapter.digest for adapter in loaded.values()}) == 4
        assert loaded["all"].bound == loaded["all"].total == 30
        assert loaded["all"].num_bytes == 4 * sum(
            tensor.numel() for tensor in load((paths["all"] / "adapter_model.safetensors").read_bytes()).values()
        )
    finally:
        for name in paths:
            llm.unload_adapter(name)
