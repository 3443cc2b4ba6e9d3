"""Handing freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
# glibc's own, before it is raised.
_LARGE_BYTES = 128 << 10


def trim_heap() -> None:
    """Hand free heap pages to the system. glibc keeps freed tensors below 32 MB otherwise: memory would seem to leak
    over many loads and unloads, and what quantising throws away would stand between what it keeps."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def map_large_tensors() -> None:
    """From now on, in this process, let tensors from 128 KiB up have pages of their own, which go back when they are
    freed.

    glibc does so until one is freed, and then keeps all that are smaller than it (up to 32 MB) on its heap. There, what
    lives for one layer's backward pass lies between what lives for the whole, and holes are not filled again by what
    has the same size: training takes 1.7 times the memory. New pages cost time, a quarter of a training step's.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
