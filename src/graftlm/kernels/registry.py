"""Which implementation of each operation is used: a set of them that whoever computes enters around the forward pass.

Outside `using` it is the reference. The choice belongs to the calling thread, so that engines with different ones can
compute side by side in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.reference.linear import grouped_matmul, linear
from graftlm.kernels.reference.lora import LoraSegment, lora


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of every operation that has more than one; each does what `ops` says under its name.

    A back-end that can do some cases only (by dtype, shape or device) is the reference with some functions replaced;
    these call the reference's for all other cases.

    name: for people.
    """

    name: str
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grouped_matmul: Callable[[Tensor, Tensor], Tensor]
    lora: Callable[[Tensor, Tensor, Iterable[LoraSegment]], None]


REFERENCE = Kernels(name="reference", linear=linear, grouped_matmul=grouped_matmul, lora=lora)

_active: ContextVar[Kernels] = ContextVar("kernels", default=REFERENCE)

# The implementations that the calling thread uses now.
active = _active.get


def choose_kernels(device: torch.device) -> Kernels:
    """The fastest there are for a device."""
    return REFERENCE


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Operations called inside are these."""
    token = _active.set(kernels)
    try:
        yield
    finally:
        _active.reset(token)
