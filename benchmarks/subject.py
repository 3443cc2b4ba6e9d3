"""What benchmarks run on: the demo's model, prompts of random tokens, and random adapters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftlm.checkpoint import open_checkpoint
from graftlm.demo import demo_model
from graftlm.models.read import read_sites
from graftlm.workload import write_random_adapter

NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN = 32, 128, 64
NUM_ADAPTERS, RANK = 8, 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def prompts() -> list[list[int]]:
    import torch

    return torch.randint(0, 40_000, (NUM_REQUESTS, PROMPT_LEN), generator=torch.Generator().manual_seed(0)).tolist()


def load_reference(dtype: str, model: Path | str | None = None) -> Any:
    """The model in transformers, a GGUF file dequantised."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(demo_model() if model is None else model)
    if not path.is_file():
        return AutoModelForCausalLM.from_pretrained(str(model or demo_model()), dtype=getattr(torch, dtype))
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
        dtype=getattr(torch, dtype),
    )


def write_adapters(
    folder: Path, *, model: Path | str | None = None, count: int = NUM_ADAPTERS, rank: int = RANK
) -> dict[str, Path]:
    """Random LoRAs on every linear layer but the head, as PEFT saves them: a0, a1, …; name -> folder."""
    checkpoint = open_checkpoint(demo_model() if model is None else model)
    sites = read_sites(checkpoint)
    checkpoint.close()
    return {
        f"a{index}": write_random_adapter(folder / f"a{index}", sites, rank=rank, seed=index) for index in range(count)
    }
