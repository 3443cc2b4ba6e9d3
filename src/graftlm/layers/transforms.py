"""Input and output transforms of patched linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Affine:
    """out * scale + shift, per column. scale, shift: [n] float32 or None. Computed in float32, rounded once."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.scale, self.shift) if tensor is not None)

    def apply(self, out: Tensor) -> None:
        result = out.float()
        if self.scale is not None:
            result = result * self.scale
        if self.shift is not None:
            result = result + self.shift
        out.copy_(result)


@dataclass(frozen=True, kw_only=True)
class PairRotation:
    """out * straight + partner * crossed, where the partner of a column is its neighbour at half the group's distance.

    straight, crossed: [n] float32. group_size: columns [g * group_size, (g + 1) * group_size) pair up their halves.
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
        pairs = values.reshape(values.shape[0], -1, 2, self.group_size // 2)
        partner = torch.stack((-pairs[:, :, 1], pairs[:, :, 0]), dim=2).reshape(values.shape)
        out.copy_(values * self.straight + partner * self.crossed)


@dataclass(frozen=True, kw_only=True)
class InputScale:
    """x * factors. factors: [in] float32. Source: IA3, arXiv 2205.05638."""

    factors: Tensor

    @property
    def num_bytes(self) -> int:
        return self.factors.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return (x.float() * self.factors).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class BlockRotation:
    """Each group of b inputs times its own matrix: x[g] @ blocks[g]. blocks: [in / b, b, b] float32.

    Source: OFT, arXiv 2306.07280.
    """

    blocks: Tensor

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        num_blocks, size, _ = self.blocks.shape
        grouped = x.float().view(x.shape[0], num_blocks, size)
        return torch.einsum("tgi,gij->tgj", grouped, self.blocks).reshape(x.shape).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class FullRotation:
    """x @ matrix. matrix: [in, in] float32. Source: BOFT, arXiv 2311.06243, its butterfly factors multiplied out."""

    matrix: Tensor

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return (x.float() @ self.matrix).to(x.dtype)
