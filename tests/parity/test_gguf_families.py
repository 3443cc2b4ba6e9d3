"""A tiny GGUF file of each of llama.cpp's architectures, served: transformers' logits on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftlm import LLM
from tests.checkpoint.gguf_converter import FAMILIES, convert, make_model
from tests.parity.oracle import LOUD, assert_close

# Longer than every window among these models.
PROMPT = torch.randint(4, 64, (120,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_of_every_architecture_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    make_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.15)
        model.save_pretrained(tmp_path)
        expected = model(torch.tensor([PROMPT])).logits[0]
        assert (expected - expected.mean(dim=0)).abs().max() > LOUD
    path = convert(family, tmp_path, tmp_path / "model.gguf")
    assert_close(LLM(path, kv_cache_bytes=1 << 20).logits(PROMPT), expected)
