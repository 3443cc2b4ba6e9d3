"""Every quantisation in every dtype on the CPU, with adapters: no cell of the table fails when a request comes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from graftlm import LLM
from graftlm.config import Quantization
from tests.engine.rig import BLOCK_BYTES, greedy, prompt, token_ids
from tests.tiny import ALL_PROJECTIONS, make_adapter, make_llama

LOUD = 1e-2
# Between the rows of a batch and a row alone, as a share of the largest logit.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("cells") / "base", intermediate_size=128, vocab_size=260)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        "lora": make_adapter(base, base.parent / "lora", seed=1, target_modules=[*ALL_PROJECTIONS, "lm_head"]),
        "dora": make_adapter(base, base.parent / "dora", seed=2, use_dora=True),
    }


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("quantization", [None, *(name for name in get_args(Quantization) if name != "none")])
def test_r103_r104_every_cell_serves_the_base_and_its_adapters_in_one_batch(
    base: Path, adapters: dict[str, Path], quantization: Quantization | None, dtype: str
) -> None:
    llm = LLM(
        base, adapters=adapters, quantization=quantization, dtype=dtype, device="cpu", kv_cache_bytes=64 * BLOCK_BYTES,
        max_num_batched_tokens=16,
    )  # fmt: skip
    rows = [None, "lora", "dora"]
    # The prompts take three chunks each, and the answers are decoded together.
    outputs = llm.generate([prompt(40)] * 3, greedy(6, ignore_eos=True), adapter=rows)
    plain = llm.logits(prompt(40)["prompt_token_ids"])
    for name, output in zip(rows, outputs, strict=True):
        ids = [*prompt(40)["prompt_token_ids"], *token_ids(output)]
        logits = llm.logits(ids, adapter=name)
        assert torch.isfinite(logits).all()
        assert name is None or (logits[:40] - plain).abs().max() > LOUD
        # Each token is the likeliest, up to rounding, when the sequence is computed in one go.
        chosen = logits[39:-1].gather(1, torch.tensor([token_ids(output)]).T)
        shortfall = logits[39:-1].max(dim=1, keepdim=True).values - chosen
        assert shortfall.max() <= ROUNDING[dtype] * (1 + logits.abs().max())
    llm.shutdown()
