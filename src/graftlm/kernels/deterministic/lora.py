"""Low-rank updates of adapters, one segment of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from graftlm.kernels.deterministic.product import product
from graftlm.kernels.reference.lora import LoraSegment
from graftlm.kernels.reference.precision import widened


def lora(out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
    """`ops.lora`."""
    for start, stop, update in segments:
        shrink = widened(update.shrink)
        shrunk = product(x[start:stop].to(shrink.dtype), shrink)
        for expand in update.expands:
            target = out[start:stop, expand.out_start : expand.out_stop]
            added = product(shrunk[:, expand.rank_start : expand.rank_stop], widened(expand.matrix))
            target.copy_(added.add_(target))
