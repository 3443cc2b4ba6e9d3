"""How much memory there is, and giving it back."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import torch


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


def trim_heap() -> None:
    """Hand free heap pages to the system. glibc keeps freed tensors below 32 MB otherwise, and memory would seem to
    leak over many loads and unloads."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
