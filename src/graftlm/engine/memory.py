"""How much memory there is, and giving it back."""

from __future__ import annotations

import gc

import psutil
import torch

from graftlm.models.heap import trim_heap


def available_bytes(device: torch.device) -> int:
    """Memory that could be taken on a device without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    return available


def return_free_memory() -> None:
    """Collect garbage and hand free heap pages to the system. Takes the interpreter for up to half a second."""
    gc.collect()
    trim_heap()
