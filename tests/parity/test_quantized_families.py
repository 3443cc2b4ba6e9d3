"""Every stored format over Gemma and GPTBigCode, with the adapters that touch a quantised module each in its own way.

Llama has every format and more kinds of adapters in test_quantized_bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from graftlm import LLM
from tests.checkpoint import gguf_converter
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import LOUD, Oracle, World, make_even_adapter, prompt_of
from tests.parity.quantized_bases import FORMATS, QuantizedBase, with_matrices
from tests.tiny import make_model

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")

# Rows are whole blocks of 64: bitsandbytes' own CPU dequantiser is wrong for others.
SIZES: dict[str, dict[str, Any]] = {
    # GGUF files have no other query scale than that of the head size.
    "gemma2": {
        "hidden_size": 64,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "intermediate_size": 128,
        "vocab_size": 260,
    },
    "gpt_bigcode": {"n_inner": 256, "vocab_size": 260},
}
GGUF_FAMILIES = {"gemma2": "gemma2", "gpt_bigcode": "starcoder"}
# nf4_double has cases of its own beside Llama's, as have gemma2-fp8 and gpt_bigcode-int8.
CASES = [
    *(("gemma2", name) for name in ("fp4", "int8", "gptq", "awq", "compressed_tensors", "q8_0")),
    *(("gpt_bigcode", name) for name in ("fp4", "gptq", "awq", "fp8", "compressed_tensors", "q8_0")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def family(case: tuple[str, str]) -> FamilyCase:
    stored = FAMILY_CASES[case[0]]
    return replace(stored, settings={**stored.settings, **SIZES[case[0]]})


@pytest.fixture(scope="module")
def world(case: tuple[str, str], family: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("base")
    full = make_model(folder / "full", family.config())
    made = gguf_base(case[0], full, folder) if case[1] == "q8_0" else FORMATS[case[1]](full, folder)
    oracle = Oracle(made.exact)
    world = World(base=made.exact, llm=LLM(made.quantized, kv_cache_bytes=16 << 20), oracle=oracle)
    assert (oracle.logits(prompt_of(20, 1)) - Oracle(full).logits(prompt_of(20, 1))).abs().max() > LOUD / 10
    yield world
    world.llm.shutdown()


def gguf_base(family: str, full: Path, folder: Path) -> QuantizedBase:
    """Every matrix in blocks of eight bits, tables included."""
    kind = gguf.GGMLQuantizationType.Q8_0
    matrices = {
        name: torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        for name, tensor in load_file(full / "model.safetensors").items()
        if tensor.ndim == 2
    }
    file = gguf_converter.convert(gguf_converter.FAMILIES[GGUF_FAMILIES[family]], full, folder / "model.gguf", kind)
    return QuantizedBase(quantized=file, exact=with_matrices(full, folder / "exact", matrices))


def test_every_kind_of_adapter_on_every_format_is_pefts_on_the_dequantised_weights(
    world: World, family: FamilyCase, tmp_path: Path
) -> None:
    targets = list(family.targets)
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": targets},
        "dora": {"target_modules": targets, "use_dora": True},
        "head": {"target_modules": [family.head], "ensure_weight_tying": False},
        "saved_head": {"target_modules": targets[:1], "modules_to_save": [family.head]},
        "saved_module": {"target_modules": targets[:1], "modules_to_save": targets[-1:]},
    }
    world.assert_parity(
        {
            name: make_even_adapter(world.base, tmp_path / name, **kind, **family.adapter_settings)
            for name, kind in kinds.items()
        },
        max_tokens=4,
    )
