"""`graft quantize` writes what transformers and bitsandbytes load, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Gemma4TextConfig
from typer.testing import CliRunner

from graftlm import LLM
from graftlm.cli import app
from graftlm.quantization.round_to_nearest import RoundToNearest
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import LOUD, assert_close, prompt_of
from tests.parity.quantized_bases import FORMATS, open_with_bitsandbytes, with_matrices
from tests.tiny import make_llama, make_model

PROMPT = list(prompt_of(20, 1))


def quantize(model: Path, out: Path, to: str, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", str(model), str(out), "--to", to, *options])
    return result.exit_code, result.output


def logits(model: Path, **options: Any) -> torch.Tensor:
    return LLM(model, kv_cache_bytes=1 << 20, **options).logits(PROMPT)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2"])
@pytest.mark.parametrize("to", ["nf4", "nf4-double", "fp4"])
def test_four_bits_are_loaded_by_transformers_and_bitsandbytes(family: str, to: str, tmp_path: Path) -> None:
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", type(case.config())(**{**case.settings, "intermediate_size": 128}))
    code, output = quantize(base, tmp_path / "out", to)
    assert code == 0, output
    ours = logits(tmp_path / "out")
    assert torch.equal(ours, logits(base, quantization=to))
    assert (ours - logits(base)).abs().max() > LOUD
    model = open_with_bitsandbytes(tmp_path / "out")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert_close(ours, model(torch.tensor([PROMPT])).logits[0].detach())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("abc")


def test_what_makes_layer_inputs_is_quantised_but_no_router_or_expert(tmp_path: Path) -> None:
    # Every row is whole blocks.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "global_head_dim": 32}
    settings = {**FAMILY_CASES["gemma4_moe"].settings, **sizes, "hidden_size_per_layer_input": 64}
    base = make_model(tmp_path / "base", Gemma4TextConfig(**settings))
    assert quantize(base, tmp_path / "out", "nf4")[0] == 0
    ours, model = logits(tmp_path / "out"), open_with_bitsandbytes(tmp_path / "out")
    assert_close(ours, model(torch.tensor([PROMPT])).logits[0].detach())
    assert (ours - logits(base)).abs().max() > LOUD
    assert isinstance(model.model.per_layer_model_projection, bnb.nn.Linear4bit)
    assert type(model.model.layers[0].router.proj) is torch.nn.Linear


def test_int8_is_loaded_by_transformers_and_bitsandbytes(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    assert quantize(base, tmp_path / "out", "int8")[0] == 0
    ours = logits(tmp_path / "out")
    assert torch.equal(ours, logits(base, quantization="int8"))
    # bitsandbytes rounds inputs to eight bits as well.
    theirs = open_with_bitsandbytes(tmp_path / "out")(torch.tensor([PROMPT])).logits[0].detach()
    assert (ours - theirs).abs().max() < 0.25


def test_gptq_rounded_to_nearest_is_read_back(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", hidden_size=128, intermediate_size=128)
    assert quantize(base, tmp_path / "out", "gptq-sym-int4")[0] == 0
    tensors = load_file(base / "model.safetensors")
    rounded = {
        name: RoundToNearest().quantize(tensor, dtype=torch.float32).dequantize()
        for name, tensor in tensors.items()
        if name.endswith("proj.weight")
    }
    ours = logits(tmp_path / "out")
    assert_close(ours, logits(with_matrices(base, tmp_path / "exact", rounded), quantization="none"))
    assert (ours - logits(base)).abs().max() > LOUD


@pytest.mark.parametrize("to", ["int4", ""])
def test_an_unknown_format_is_refused_with_the_known_ones(to: str, tmp_path: Path) -> None:
    code, output = quantize(make_llama(tmp_path / "base"), tmp_path / "out", to)
    assert code == 2
    assert "nf4-double" in output
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_nothing_is_quantised_twice_unasked(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    assert "output folder is not empty" in quantize(base, base, "nf4")[1]
    assert quantize(base, tmp_path / "out", "nf4")[0] == 0
    code, output = quantize(tmp_path / "out", tmp_path / "again", "nf4")
    assert code == 2
    assert "quantised already" in output
    assert "bitsandbytes" in output
    assert "add requantize" in output
    assert not (tmp_path / "again").exists()


# With a quantised head and table, with a head alone, with neither.
@pytest.mark.parametrize("stored", ["q4_0", "gptq", "int8_head", "nf4_double"])
def test_what_is_quantised_already_is_dequantised_first_on_request(stored: str, tmp_path: Path) -> None:
    full = make_llama(tmp_path / "full", intermediate_size=128, vocab_size=260)
    base = FORMATS[stored](full, tmp_path / "made").quantized
    code, output = quantize(base, tmp_path / "out", "fp4", "--requantize")
    assert code == 0, output
    ours = logits(tmp_path / "out")
    assert torch.equal(ours, logits(base, quantization="fp4", requantize=True))
    assert (ours - logits(base)).abs().max() > LOUD
    assert_close(ours, open_with_bitsandbytes(tmp_path / "out")(torch.tensor([PROMPT])).logits[0].detach())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("abc")


def test_skipped_modules_are_written_as_they_were(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", hidden_size=128, intermediate_size=128)
    before = load_file(base / "model.safetensors")
    for to in ("nf4", "gptq-sym-int4"):
        assert quantize(base, tmp_path / to, to, "--skip", "mlp", "--skip", "layers.1")[0] == 0
        after = load_file(tmp_path / to / "model.safetensors")
        for name, tensor in before.items():
            kept = ".mlp." in name or "layers.1." in name or not name.endswith("proj.weight")
            assert (name in after and torch.equal(after[name], tensor)) == kept
        assert (logits(tmp_path / to) - logits(base)).abs().max() > LOUD
    theirs = open_with_bitsandbytes(tmp_path / "nf4")(torch.tensor([PROMPT])).logits[0].detach()
    assert_close(logits(tmp_path / "nf4"), theirs)
