"""A linear layer that carries adapters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.patch import LinearPatch, MaskedUpdate, PartOverride, Slot
from graftlm.layers.segments import Segments
from graftlm.quantization import Weight


class Linear:
    """y = x @ W.T + bias, plus each segment's patch. One object may hold several projections stacked (q, k and v)."""

    def __init__(self, slot: Slot, weight: Weight, bias: Tensor | None = None) -> None:
        self.slot = slot
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, in] -> [T, out]."""
        out = self.weight.matmul(x, self.bias)
        if segments:
            updates = segments.low_rank(self.slot)
            if updates is not None:
                ops.lora(out, x, updates)
            apply_patches(out, x, segments.patches(self.slot))
        return out


def apply_patches(out: Tensor, x: Tensor, patched: Iterable[tuple[int, int, LinearPatch]]) -> None:
    """Change the rows of a base result that carry a patch, in place.

    Args:
        out: [T, out], the base's result with its bias. x: [T, in].
        patched: (start, stop, patch) of each segment.
    """
    updates = []
    for start, stop, patch in patched:
        if patch.overrides:
            _override(out[start:stop], x[start:stop], patch.overrides)
        if patch.outputs:
            _transform(out[start:stop], x[start:stop], patch)
        elif patch.low_rank is not None:
            updates.append(ops.LoraSegment(start, stop, patch.low_rank))
        for update in patch.masked:
            _add_masked(out[start:stop], x[start:stop], update)
    if updates:
        ops.lora(out, x, updates)


def _add_masked(out: Tensor, x: Tensor, update: MaskedUpdate) -> None:
    """out: [T, out], changed in place. x: [T, in]."""
    inputs = update.mask(x)
    if update.scaled is not None:
        own = out.narrow(1, update.out_start, update.out_stop - update.out_start)
        own.add_(update.scaled.weight.matmul(inputs) * update.scaled.gain)
    ops.lora(out, inputs, [ops.LoraSegment(0, len(out), update.low_rank)])


def _override(out: Tensor, x: Tensor, overrides: Iterable[PartOverride]) -> None:
    for override in overrides:
        inputs = x if override.transform is None else override.transform(x)
        out[:, override.out_start : override.out_stop] = override.weight.matmul(inputs, override.bias)


def _transform(out: Tensor, x: Tensor, patch: LinearPatch) -> None:
    """Output transforms, then the update, in float32 and rounded once: what PEFT does for a single adapter."""
    exact = ops.widened(out)
    for part in patch.outputs:
        part.transform.apply(exact[:, part.out_start : part.out_stop])
    if patch.low_rank is not None:
        ops.lora(exact, x, [ops.LoraSegment(0, len(exact), patch.low_rank)])
    if exact is not out:
        out.copy_(exact)
