"""The library's calls of one computation, with the memory they work in, so that they can be made again."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Memory that is handed out in blocks, and again once no tensor is in it any more. It never goes back to the
    system: calls in a log hold its addresses. Sizes are powers of two, so that steps of other numbers of rows share
    them."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        capacity = 1 << (num_bytes - 1).bit_length()
        free = self._free.setdefault(capacity, [])
        block = free.pop() if free else _aligned(capacity)
        # A tensor's storage holds what it was made from, and with it this, for as long as any view of it is there.
        lease = (ctypes.c_char * num_bytes).from_buffer(block.data)
        weakref.finalize(lease, free.append, block)
        return torch.frombuffer(lease, dtype=dtype).view(tuple(shape))

    @staticmethod
    def unleased(tensor: Tensor) -> Tensor:
        """The same memory, which may be handed out to others. tensor: of an arena that lives on, contiguous."""
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class CallLog:
    """words: of each call, as csrc's `graft_replay` reads them. kept: what the calls read that nothing else holds."""

    def __init__(self, arena: Arena) -> None:
        self.words = array("q")
        self.num_calls = 0
        self.kept: list[object] = []
        self._arena = arena

    def add(self, function: int, arguments: Sequence[int], kept: Sequence[object]) -> None:
        """function: the address of what takes the arguments as words."""
        self.words.extend((function, len(arguments), *arguments))
        self.num_calls += 1
        self.kept.extend(kept)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For a result. Where an earlier one's memory is taken, that was let go of before this call."""
        return self._arena.empty(shape, dtype)


_current: ContextVar[CallLog | None] = ContextVar("call_log", default=None)

# The log that the calling thread's calls go to.
current_log = _current.get


@contextmanager
def logging_to(log: CallLog) -> Iterator[None]:
    token = _current.set(log)
    try:
        yield
    finally:
        _current.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a result of the library's."""
    log = current_log()
    return torch.empty(shape, dtype=dtype) if log is None else log.empty(shape, dtype)


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
