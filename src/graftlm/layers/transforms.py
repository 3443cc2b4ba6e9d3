"""Input and output transforms of patched linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graftlm.kernels import ops


@dataclass(frozen=True, kw_only=True)
class Affine:
    """out * scale + shift, per column. scale, shift: [n] float32 or None. Computed in float32, rounded once."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.scale, self.shift) if tensor is not None)

    def apply(self, out: Tensor) -> None:
        # Autograd keeps what is multiplied, and `out` is about to change.
        result = out.clone() if torch.is_grad_enabled() else out
        result = ops.widened(result)
        if self.scale is not None:
            result = result * self.scale
        if self.shift is not None:
            result = result + self.shift
        out.copy_(result)

    def fold_weight(self, weight: Tensor) -> Tensor:
        return weight if self.scale is None else weight * self.scale[:, None]

    def fold_bias(self, bias: Tensor | None) -> Tensor | None:
        scaled = bias if bias is None or self.scale is None else bias * self.scale
        return self.shift if scaled is None else scaled if self.shift is None else scaled + self.shift


@dataclass(frozen=True, kw_only=True)
class PairRotation:
    """Columns i and j, half a group apart: out[i] * straight[i] - out[j] * crossed[i] in place of out[i], and
    out[j] * straight[j] + out[i] * crossed[j] in place of out[j].

    straight, crossed: [n] float32. group_size: even; divides n into the groups.
    Source: RoAd, arXiv 2409.00119; peft/tuners/road/layer.py.
    """

    straight: Tensor
    crossed: Tensor
    group_size: int

    @property
    def num_bytes(self) -> int:
        return self.straight.nbytes + self.crossed.nbytes

    def apply(self, out: Tensor) -> None:
        values = out.float()
        num_rows, num_columns = values.shape
        pairs = values.reshape(num_rows, num_columns // self.group_size, 2, self.group_size // 2)
        partner = torch.stack((-pairs[:, :, 1], pairs[:, :, 0]), dim=2).reshape(values.shape)
        out.copy_(values * self.straight + partner * self.crossed)

    def fold_weight(self, weight: Tensor) -> Tensor:
        columns = weight.t().contiguous()
        self.apply(columns)
        return columns.t()

    def fold_bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.fold_weight(bias[:, None])[:, 0]


@dataclass(frozen=True, kw_only=True)
class InputScale:
    """x * factors. factors: [in] float32. Source: IA3, arXiv 2205.05638."""

    factors: Tensor

    @property
    def num_bytes(self) -> int:
        return self.factors.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return (x.float() * self.factors).to(x.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        return self(weight)


@dataclass(frozen=True, kw_only=True)
class BlockRotation:
    """Each group of b inputs times its own matrix: x[g] @ blocks[g].

    blocks: [in / b, b, b] float32, or [1, b, b] when all groups share one. order: [in] int64; the groups are formed of
    x[order], and the result goes back to where it came from; None for the order as it is.
    Source: OFT, arXiv 2306.07280; with an order one butterfly factor of BOFT, arXiv 2311.06243.
    """

    blocks: Tensor
    order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + (0 if self.order is None else self.order.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        size = self.blocks.shape[-1]
        inputs = x.float() if self.order is None else x.float()[:, self.order]
        grouped = inputs.reshape(x.shape[0], x.shape[1] // size, size)
        rotated = ops.grouped_matmul(grouped, self.blocks).reshape(x.shape)
        if self.order is not None:
            rotated = torch.empty_like(rotated).index_copy_(1, self.order, rotated)
        return rotated.to(x.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        return replace(self, blocks=self.blocks.mT)(weight)


@dataclass(frozen=True, kw_only=True)
class Successive:
    """One input transform after the other, first to last, rounded once."""

    transforms: tuple[BlockRotation, ...]

    @property
    def num_bytes(self) -> int:
        return sum(transform.num_bytes for transform in self.transforms)

    def __call__(self, x: Tensor) -> Tensor:
        rotated = x.float()
        for transform in self.transforms:
            rotated = transform(rotated)
        return rotated.to(x.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        for transform in reversed(self.transforms):
            weight = transform.fold(weight)
        return weight
