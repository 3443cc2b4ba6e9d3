"""Handing freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Hand free heap pages to the system. glibc keeps freed tensors below 32 MB otherwise: memory would seem to leak
    over many loads and unloads, and what quantising throws away would stand between what it keeps."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
