"""LoRA adapters with random weights, for measuring: they say nothing sensible, and cost what a trained one costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from graftlm.adapters.files import CONFIG_NAME, SAFETENSORS_NAME
from graftlm.errors import ConfigurationError
from graftlm.models.site import SiteMap

# Of B: loud enough to change what is said.
B_STD = 0.02


def write_random_adapter(folder: Path, sites: SiteMap, *, rank: int, seed: int) -> Path:
    """Write a LoRA on every linear layer but the head, as PEFT saves one that was trained on "all-linear".

    Args:
        folder: is made. sites: of the base. seed: of the weights; two seeds are two adapters.

    Returns: the folder. Tensors are float32: `lora_A.weight` [rank, in], `lora_B.weight` [out, rank], neither zero.

    Raises:
        ConfigurationError: the rank is below 1.
    """
    if rank < 1:
        raise ConfigurationError("rank must be a positive integer", got=rank)
    generator = torch.Generator().manual_seed(seed)
    linears = {path: site for path, site in sites.linears.items() if path != sites.head_path}
    tensors: dict[str, Tensor] = {}
    for path, site in linears.items():
        name = f"base_model.model.{path}"
        lora_a = torch.randn(rank, site.in_features, generator=generator) / math.sqrt(site.in_features)
        lora_b = torch.randn(site.out_features, rank, generator=generator) * B_STD
        tensors |= {f"{name}.lora_A.weight": lora_a, f"{name}.lora_B.weight": lora_b}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(site.transposed for site in linears.values()),
        "inference_mode": True,
        "target_modules": sorted({path.rpartition(".")[2] for path in linears}),
    }
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / SAFETENSORS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
