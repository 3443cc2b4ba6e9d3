"""Half precision, in adapters and in bases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm import LLM
from graftlm.errors import AdapterUnsupported
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import LOUD, Oracle, World, greedy, make_even_adapter, make_world, prompt_of
from tests.tiny import ALL_PROJECTIONS, make_model

HALVES = {"fp16": [torch.float16], "bf16": [torch.bfloat16], "mixed": [torch.float32, torch.bfloat16, torch.float16]}


def cast(adapter: Path, folder: Path, dtypes: list[torch.dtype]) -> Path:
    """A copy of an adapter in other dtypes, one tensor after the other."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = {name: tensor.to(dtypes[index % len(dtypes)]) for index, (name, tensor) in enumerate(tensors.items())}
    save_file(changed, folder / "adapter_model.safetensors")
    return folder


def test_r037_adapters_saved_in_half_precision_are_computed_in_float32_as_peft_does(
    untied: World, tmp_path: Path
) -> None:
    full = make_even_adapter(untied.base, tmp_path / "full", target_modules=[*ALL_PROJECTIONS, "lm_head"])
    halves = {name: cast(full, tmp_path / name, dtypes) for name, dtypes in HALVES.items()}
    untied.assert_parity({"full": full, **halves})
    prompt = prompt_of(40, 6)
    with untied.loaded({"full": full, **halves}):
        exact = untied.llm.logits(prompt, adapter="full")
        for name in halves:
            assert 0 < (untied.llm.logits(prompt, adapter=name) - exact).abs().max() < 5e-2, name
            # What bfloat16 holds stays in it.
            share = 2 if name == "bf16" else 1
            assert untied.llm.adapters[name].num_bytes == untied.llm.adapters["full"].num_bytes // share


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool], ids=str)
def test_r037_adapters_saved_in_other_dtypes_are_refused_by_name(
    dtype: torch.dtype, untied: World, tmp_path: Path
) -> None:
    adapter = cast(make_even_adapter(untied.base, tmp_path / "full"), tmp_path / "odd", [torch.float32, dtype])
    with pytest.raises(AdapterUnsupported, match=rf"lora_B\.weight has an unsupported dtype; got: {dtype}"):
        untied.llm.load_adapter("odd", adapter)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def divergence(exact: Tensor, ours: Tensor) -> float:
    """Mean KL(exact || ours)."""
    log_exact, log_ours = exact.log_softmax(-1), ours.log_softmax(-1)
    return (log_exact.exp() * (log_exact - log_ours)).sum(-1).mean().item()


def agreement(ours: Tensor, exact: Tensor) -> float:
    return (ours.argmax(-1) == exact.argmax(-1)).double().mean().item()


# One of each; of mixtures of experts, where a route may flip, test_moe compares what does not.
DENSE = [
    "llama",
    "llama_tied",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt2_untied",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon_40b",
    "phi",
]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
def test_a_bfloat16_base_is_as_close_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    # FAMILIES.md §2.0, C16, over 2048 positions for the base and for each adapter.
    case = FAMILY_CASES[name]
    base = make_model(tmp_path / "base", case.config(), dtype=torch.bfloat16)
    llm = make_world(base).llm
    assert greedy(llm, [(None, prompt_of(5, 0))], 4)
    half, single = Oracle(base, torch.bfloat16), Oracle(base, torch.float32)
    adapters: dict[str, Path | None] = {
        "base": None,
        "lora": make_even_adapter(
            base, tmp_path / "lora", target_modules=[*case.targets, case.head], **case.adapter_settings
        ),
        "embedding": make_even_adapter(base, tmp_path / "embedding", target_modules=[case.embedding]),
        "rslora": make_even_adapter(
            base,
            tmp_path / "rslora",
            r=64,
            use_rslora=True,
            target_modules=list(case.targets),
            **case.adapter_settings,
        ),
    }
    texts = [prompt_of(256, 10 + index) for index in range(8)]
    exact_base = torch.cat([single.logits(text) for text in texts])
    for name, path in adapters.items():
        if path is not None:
            llm.load_adapter(name, path)
        ours = torch.cat([llm.logits(text, adapter=name if path else None) for text in texts])
        theirs = torch.cat([half.logits(text, path) for text in texts])
        exact = torch.cat([single.logits(text, path) for text in texts])
        assert relative_error(ours, exact) <= 1.25 * relative_error(theirs, exact) + 1e-3
        assert divergence(exact, ours) <= 1.25 * divergence(exact, theirs) + 1e-4
        assert agreement(ours, exact) >= agreement(theirs, exact) - 0.01
        assert agreement(ours, exact) > 0.9
        if path is not None:
            assert (exact - exact_base).abs().max() > LOUD


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_r102_every_dtype_serves_base_and_adapters_on_the_cpu(dtype: str, untied: World, tmp_path: Path) -> None:
    adapter = cast(make_even_adapter(untied.base, tmp_path / "a"), tmp_path / "fp16", [torch.float16])
    llm = LLM(untied.base, dtype=dtype, kv_cache_bytes=1 << 20, adapters={"fp16": adapter})
    greedy(llm, [(None, prompt_of(9, 1)), ("fp16", prompt_of(9, 1))], 8)
    prompt = prompt_of(60, 2)
    for name, path in (("fp16", adapter), (None, None)):
        expected = untied.oracle.logits(prompt, path)
        allowed = 1e-4 if dtype in ("auto", "float32") else 0.3
        assert (llm.logits(prompt, adapter=name) - expected).abs().max() < allowed
