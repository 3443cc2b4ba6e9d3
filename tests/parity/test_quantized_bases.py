"""Quantised bases with every kind of adapter, against transformers and PEFT on the dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftlm import LLM
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import LOUD, Oracle, World, make_even_adapter, prompt_of
from tests.parity.quantized_bases import FORMATS
from tests.tiny import make_model

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")

# Rows are whole blocks of 64: bitsandbytes' own CPU dequantiser is wrong for others. GGUF's tokenizer has 260 ids.
SIZES = {"intermediate_size": 128, "vocab_size": 260}
GEMMA_SIZES = {"hidden_size": 64, "head_dim": 32}
GPT_SIZES = {"n_inner": 128, "vocab_size": 260}
FAMILIES = {
    "llama": replace(FAMILY_CASES["llama"], settings={**FAMILY_CASES["llama"].settings, **SIZES}),
    "llama_tied": replace(FAMILY_CASES["llama_tied"], settings={**FAMILY_CASES["llama_tied"].settings, **SIZES}),
    "gemma2": replace(FAMILY_CASES["gemma2"], settings={**FAMILY_CASES["gemma2"].settings, **SIZES, **GEMMA_SIZES}),
    "gpt_bigcode": replace(FAMILY_CASES["gpt_bigcode"], settings={**FAMILY_CASES["gpt_bigcode"].settings, **GPT_SIZES}),
    "gpt2": replace(FAMILY_CASES["gpt2_untied"], settings={**FAMILY_CASES["gpt2_untied"].settings, **GPT_SIZES}),
}
CASES = [
    *(("llama", name) for name in FORMATS if name != "int8"),
    ("llama_tied", "nf4_double"),
    ("llama_tied", "q4_0"),
    ("gemma2", "nf4_double"),
    ("gemma2", "fp8"),
    ("gpt_bigcode", "nf4_double"),
    ("gpt_bigcode", "int8"),
    ("gpt2", "nf4_head"),
    ("gpt2", "int8"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def family(case: tuple[str, str]) -> FamilyCase:
    return FAMILIES[case[0]]


@pytest.fixture(scope="module")
def world(case: tuple[str, str], family: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("base")
    full = make_model(folder / "full", family.config())
    made = FORMATS[case[1]](full, folder)
    oracle = Oracle(made.exact)
    moved = (oracle.logits(prompt_of(20, 1)) - Oracle(full).logits(prompt_of(20, 1))).abs().max()
    assert moved > LOUD, f"quantising moved the logits by {moved} only"
    world = World(base=made.exact, llm=LLM(made.quantized, kv_cache_bytes=16 << 20), oracle=oracle)
    yield world
    world.llm.shutdown()


def test_r030_adapters_on_a_quantised_base_are_pefts_on_its_dequantised_weights(
    world: World, family: FamilyCase, tmp_path: Path
) -> None:
    targets, settings = list(family.targets), dict(family.adapter_settings)
    everything = [*targets, family.embedding, family.head]
    adapters = {
        "lora": make_even_adapter(
            world.base, tmp_path / "lora", target_modules=everything, ensure_weight_tying=False, **settings
        ),
        "dora": make_even_adapter(world.base, tmp_path / "dora", target_modules=targets, use_dora=True, **settings),
        "head": make_even_adapter(
            world.base, tmp_path / "head", target_modules=[family.head], ensure_weight_tying=False, **settings
        ),
        "head_dora": make_even_adapter(
            world.base,
            tmp_path / "head_dora",
            target_modules=[family.head],
            use_dora=True,
            ensure_weight_tying=False,
            **settings,
        ),
        "saved_head": make_even_adapter(
            world.base, tmp_path / "saved", target_modules=targets[:1], modules_to_save=[family.head], **settings
        ),
        "saved_module": make_even_adapter(
            world.base, tmp_path / "module", target_modules=targets[:1], modules_to_save=targets[-1:], **settings
        ),
    }
    world.assert_parity(adapters, max_tokens=4)


def test_r034_each_projection_of_a_group_has_rows_of_its_own(world: World, family: FamilyCase, tmp_path: Path) -> None:
    """The first three targets are q, k and v where these are apart; k and v have fewer heads. Gemma 2 caps what queries
    and keys alone can move."""
    adapters = {
        target: make_even_adapter(world.base, tmp_path / target, target_modules=[target], **family.adapter_settings)
        for target in family.targets[:3]
    }
    base = world.oracle.logits(prompt_of(64, 2))
    moved = [(world.oracle.logits(prompt_of(64, 2), folder) - base).abs().max().item() for folder in adapters.values()]
    assert min(moved) > (LOUD if family.config_class != "Gemma2Config" else 0.0)
    world.assert_parity(adapters, max_tokens=4, loud=False)


def test_r029_an_adapter_is_active_whenever_it_was_loaded(world: World, family: FamilyCase, tmp_path: Path) -> None:
    first, second = (
        make_even_adapter(world.base, tmp_path / name, seed=seed, target_modules=list(family.targets))
        for seed, name in enumerate(("first", "second"))
    )
    expected = world.oracle.logits(prompt_of(7, 1), first)
    assert (expected - world.oracle.logits(prompt_of(7, 1))).abs().max() > LOUD
    for others_before, others_left in ((False, False), (True, True), (True, False)):
        if others_before:
            world.llm.load_adapter("other", second)
            world.llm.logits(prompt_of(7, 1), adapter="other")
        if others_before and not others_left:
            world.llm.unload_adapter("other")
        with world.loaded({"mine": first}):
            torch.testing.assert_close(world.llm.logits(prompt_of(7, 1), adapter="mine"), expected, rtol=0, atol=1e-4)
        if others_left:
            world.llm.unload_adapter("other")
