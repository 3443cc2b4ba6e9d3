"""Linear layers of which each rank has some of the inputs (Megatron-LM's row-parallel layers)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.collective import Collective
from graftlm.layers.linear import Linear
from graftlm.layers.patch import LinearPatch, Slot
from graftlm.layers.segments import Segments
from graftlm.quantization import Weight


class RowParallelLinear(Linear):
    """y = post(sum over ranks of W[:, own] pre(x[own]) + bias) + (sum over ranks of x[own] A[:, own].T) B.T

    Partial sums of the weight and of the low-rank updates travel in one all-reduce; what is not linear in the rank's
    share (bias, output transforms) comes once, after it. Patches are this rank's: see `distributed.patch_shard`.

    weight: [out, own inputs]. bias: [out], the same on every rank.
    Source: Megatron-LM, arXiv 1909.08053.
    """

    def __init__(self, slot: Slot, weight: Weight, bias: Tensor | None, collective: Collective) -> None:
        super().__init__(slot, weight, bias)
        self._collective = collective

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, own inputs] -> [T, out], the same on every rank."""
        patched = [
            (slice(segment.start, segment.stop), patch)
            for segment in segments
            if (patch := segment.patch.linears.get(self.slot)) is not None
        ]
        out = self.weight.matmul(x)
        for rows, patch in patched:
            for override in patch.overrides:
                inputs = x[rows] if override.transform is None else override.transform(x[rows])
                out[rows, override.out_start : override.out_stop] = override.weight.matmul(inputs)
        updates = self._updates(out, x, patched)
        out, updates = self._reduced(out, updates)
        self._finish(out, updates, patched)
        return out

    def _updates(self, out: Tensor, x: Tensor, patched: Sequence[tuple[slice, LinearPatch]]) -> Tensor | None:
        """Adds low-rank updates to the partial result, or puts them beside it where output transforms, which leave
        them alone, are still to come."""
        added = [(rows, patch) for rows, patch in patched if not patch.outputs]
        _add_low_rank(out, x, added)
        kept = [(rows, patch) for rows, patch in patched if patch.outputs and patch.low_rank is not None]
        if not kept:
            return None
        updates = torch.zeros_like(out)
        _add_low_rank(updates, x, kept)
        return updates

    def _reduced(self, out: Tensor, updates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if updates is None:
            return self._collective.all_reduce(out), None
        both = self._collective.all_reduce(torch.stack((out, updates)))
        return both[0], both[1]

    def _finish(self, out: Tensor, updates: Tensor | None, patched: Sequence[tuple[slice, LinearPatch]]) -> None:
        if self.bias is not None:
            # Rows whose weight is another's have its bias.
            bias = self.bias.expand_as(out)
            if any(patch.overrides for _, patch in patched):
                bias = bias.clone()
                for rows, patch in patched:
                    for override in patch.overrides:
                        bias[rows, override.out_start : override.out_stop] = 0
            out += bias
        for rows, patch in patched:
            for override in patch.overrides:
                if override.bias is not None:
                    out[rows, override.out_start : override.out_stop] += override.bias
            for part in patch.outputs:
                part.transform.apply(out[rows, part.out_start : part.out_stop])
        if updates is not None:
            out += updates


def _add_low_rank(out: Tensor, x: Tensor, patched: Sequence[tuple[slice, LinearPatch]]) -> None:
    updates = [
        ops.LoraSegment(rows.start, rows.stop, patch.low_rank) for rows, patch in patched if patch.low_rank is not None
    ]
    if updates:
        ops.lora(out, x, updates)
