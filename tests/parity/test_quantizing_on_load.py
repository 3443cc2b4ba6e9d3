"""Bases that are quantised while they are read, against transformers and bitsandbytes doing the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import BitsAndBytesConfig

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import ConfigurationError
from graftlm.models.quantized_export import export_quantized
from graftlm.quantization.written import written_format
from tests.parity.oracle import LOUD, Oracle, assert_close, count_ties, greedy, make_even_adapter, prompt_of
from tests.parity.quantized_bases import FORMATS, NF4_DOUBLE, WITH_HEAD, bitsandbytes_base, open_with_bitsandbytes
from tests.tiny import make_llama

FOUR_BIT: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
# intermediate_size: rows of whole blocks, where bitsandbytes' own CPU dequantiser is right.
SIZES = {"intermediate_size": 128, "vocab_size": 260}
PROMPT = prompt_of(20, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"), **SIZES)


@pytest.fixture(scope="module")
def quantized(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FORMATS["nf4_double"](base, tmp_path_factory.mktemp("nf4")).quantized


def load(base: Path, **options: Any) -> LLM:
    return LLM(base, kv_cache_bytes=1 << 20, **options)


@pytest.mark.parametrize(
    ("quantization", "config"),
    [
        ("nf4", {**FOUR_BIT, "bnb_4bit_quant_type": "nf4"}),
        ("nf4-double", {**FOUR_BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
        ("fp4", FOUR_BIT),
        ("fp4-double", {**FOUR_BIT, "bnb_4bit_use_double_quant": True}),
    ],
)
def test_four_bits_on_load_are_those_transformers_saves(
    quantization: str, config: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    saved = bitsandbytes_base(base, tmp_path, **config).quantized
    ours = load(base, quantization=quantization).logits(PROMPT)
    assert torch.equal(ours, load(saved).logits(PROMPT))
    assert (ours - load(base).logits(PROMPT)).abs().max() > LOUD


def test_int8_on_load_is_transformers_but_for_its_rounding_to_float16(base: Path, tmp_path: Path) -> None:
    saved = load(bitsandbytes_base(base, tmp_path, load_in_8bit=True).quantized).logits(PROMPT)
    ours, full = load(base, quantization="int8").logits(PROMPT), load(base).logits(PROMPT)
    assert (ours - full).abs().max() > LOUD
    assert (ours - saved).abs().max() < 0.1


def test_bfloat16_weights_are_quantised_from_bfloat16(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16, **SIZES)
    saved = bitsandbytes_base(base, tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4").quantized
    assert torch.equal(load(base, quantization="nf4").logits(PROMPT), load(saved, dtype="bfloat16").logits(PROMPT))


@pytest.mark.parametrize("tied", [False, True])
def test_r033_the_head_is_quantised_only_on_request(tied: bool, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", tied=tied, **SIZES)
    default = load(base, quantization="nf4-double").logits(PROMPT)
    with_head = load(base, quantization="nf4-double", quantize_head=True).logits(PROMPT)
    assert (default - with_head).abs().max() > LOUD
    if not tied:
        saved = bitsandbytes_base(base, tmp_path, **NF4_DOUBLE, **WITH_HEAD).quantized
        assert torch.equal(with_head, load(saved).logits(PROMPT))


def test_a_qlora_adapter_gives_the_tokens_of_peft_and_bitsandbytes(base: Path, tmp_path: Path) -> None:
    adapter = make_even_adapter(
        base, tmp_path / "qlora", target_modules=["q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"]
    )
    quantized = open_with_bitsandbytes(base, BitsAndBytesConfig(**NF4_DOUBLE))
    model = peft.PeftModel.from_pretrained(quantized, adapter).train()
    llm = load(base, quantization="nf4-double", adapters={"qlora": adapter})
    [answer] = greedy(llm, [("qlora", PROMPT)], 32)
    whole = [*PROMPT, *answer]
    expected = model(torch.tensor([whole])).logits[0].detach()
    assert_close(llm.logits(whole, adapter="qlora"), expected)
    assert count_ties(expected[len(PROMPT) - 1 : -1], answer) <= 1
    assert (expected - llm.logits(whole)).abs().max() > LOUD


def test_r035_the_stored_quantisation_is_not_replaced_by_another(quantized: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"already quantised.*'int8' for a checkpoint in nf4-double"):
        load(quantized, quantization="int8")
    with pytest.raises(ConfigurationError, match="leave quantize_head out"):
        load(quantized, quantization="nf4-double", quantize_head=True)
    with pytest.raises(ConfigurationError, match="leave quantize_skip out"):
        load(quantized, quantization="nf4-double", quantize_skip=["o_proj"])


def test_r035_asking_for_what_is_stored_changes_nothing(quantized: Path) -> None:
    assert torch.equal(load(quantized, quantization="nf4-double").logits(PROMPT), load(quantized).logits(PROMPT))


def test_a_quantised_checkpoint_can_be_dequantised_or_requantised_on_request(base: Path, tmp_path: Path) -> None:
    made = FORMATS["q4_0"](base, tmp_path)
    exact = Oracle(made.exact).logits(PROMPT)
    assert_close(load(made.quantized, quantization="none").logits(PROMPT), exact)
    again = load(made.quantized, quantization="nf4", requantize=True).logits(PROMPT)
    assert torch.equal(again, load(made.exact, quantization="nf4").logits(PROMPT))
    assert (again - exact).abs().max() > LOUD


def test_skipped_modules_are_those_transformers_skips(base: Path, tmp_path: Path) -> None:
    skipped = ["o_proj", "model.layers.1.mlp", "lm_head"]
    saved = bitsandbytes_base(base, tmp_path, **NF4_DOUBLE, llm_int8_skip_modules=skipped).quantized
    ours = load(base, quantization="nf4-double", quantize_skip=skipped, quantize_head=True).logits(PROMPT)
    assert torch.equal(ours, load(saved).logits(PROMPT))
    assert (ours - load(base, quantization="nf4-double").logits(PROMPT)).abs().max() > LOUD


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_head_is_skipped_by_either_name(name: str, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", tied=True, **SIZES)
    skipping = load(base, quantization="nf4", quantize_head=True, quantize_skip=[name]).logits(PROMPT)
    assert torch.equal(skipping, load(base, quantization="nf4").logits(PROMPT))


def test_part_of_a_name_skips_nothing_and_is_refused(base: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not have; got: 'proj', 'layers.7'; .*q_proj"):
        load(base, quantization="nf4", quantize_skip=["proj", "down_proj", "layers.7"])


def test_one_log_line_says_what_was_quantised(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="graftlm"):
        load(base, quantization="int8", quantize_skip=["k_proj"])
    [line] = [record.getMessage() for record in caplog.records if "quantised" in record.getMessage()]
    assert line.startswith("12 modules are quantised to int8")
    num_weights = 2 * (64 * (64 + 32 + 64) + 3 * 64 * 128)
    num_bytes = num_weights + 2 * 4 * (64 + 32 + 64 + 2 * 128 + 64)
    assert f"{num_bytes / 2**20:.1f} MiB, {num_bytes / num_weights:.4f} bytes per weight" in line


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quantization": "int4"}, "quantization is not one.*'int4'.*nf4-double"),
        ({"quantization": 4}, "quantization is not one"),
        ({"quantize_head": True}, "quantize_head says how to quantise"),
        ({"quantize_skip": ["o_proj"]}, "quantize_skip says how to quantise"),
        ({"quantize_skip": "o_proj", "quantization": "nf4"}, "not a list of module names.*'o_proj'"),
        ({"requantize": True, "quantization": "none"}, "requantize says how to quantise"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], match: str, base: Path) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load(base, **options)


def test_a_config_that_promises_what_the_tensors_lack_is_logged(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = FORMATS["nf4_double"](base, tmp_path).quantized
    (folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    with caplog.at_level(logging.WARNING):
        logits = load(folder).logits(PROMPT)
    assert torch.equal(logits, load(base).logits(PROMPT))
    assert "no module of it is quantised" in caplog.text
    # The tensors win: what is not quantised can be, to anything, and by the command as well.
    for quantization in ("nf4-double", "int8"):
        quantised = load(base, quantization=quantization).logits(PROMPT)
        assert torch.equal(load(folder, quantization=quantization).logits(PROMPT), quantised)
        assert (quantised - logits).abs().max() > LOUD
    export_quantized(open_checkpoint(folder), tmp_path / "written", written_format("int8"))
    assert torch.equal(load(tmp_path / "written").logits(PROMPT), quantised)
