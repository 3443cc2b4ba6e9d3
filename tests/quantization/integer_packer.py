"""Packs integer codes from the formats' descriptions alone: a bit at a time, in Python's integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_line(codes: Sequence[int], bits: int) -> list[int]:
    """Codes side by side, the first in the lowest bits, cut into words of 32 bits."""
    words = [0] * -(-len(codes) * bits // 32)
    for position, code in enumerate(codes):
        for bit in range(bits):
            place = position * bits + bit
            words[place // 32] |= (code >> bit & 1) << (place % 32)
    return words


def signed_words(lines: Sequence[Sequence[int]]) -> Tensor:
    """int32 [lines, words] with these bits."""
    return torch.from_numpy(np.array(lines, dtype=np.uint32).view(np.int32).copy())


@dataclass(frozen=True, kw_only=True)
class IntegerMatrix:
    """Random codes of a matrix, as GPTQ counts them: inputs first.

    codes: [K, N]. zeros, scales: [G, N]. groups: [K].
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.codes.shape[0]

    def expected(self) -> Tensor:
        """The matrix, [N, K] float32, an element at a time."""
        inputs, outputs = self.codes.shape
        matrix = np.zeros((outputs, inputs), dtype=np.float32)
        scales = self.scales.float().numpy()
        for k in range(inputs):
            group = int(self.groups[k])
            for n in range(outputs):
                steps = np.float32(int(self.codes[k, n]) - int(self.zeros[group, n]))
                matrix[n, k] = steps * scales[group, n]
        return torch.from_numpy(matrix)

    def gptq(self, path: str, *, offset: int = 1) -> dict[str, Tensor]:
        """GPTQ's tensors. offset: what version 1 subtracts from zero points."""
        stored_zeros = (self.zeros - offset) % (1 << self.bits)
        columns = signed_words([pack_line(line, self.bits) for line in self.codes.T.tolist()])
        return {
            f"{path}.qweight": columns.T.contiguous(),
            f"{path}.qzeros": signed_words([pack_line(line, self.bits) for line in stored_zeros.tolist()]),
            f"{path}.scales": self.scales,
            f"{path}.g_idx": self.groups.to(torch.int32),
        }

    def awq(self, path: str) -> dict[str, Tensor]:
        """AWQ's tensors in the gemm layout."""
        return {
            f"{path}.qweight": signed_words([_awq_line(line) for line in self.codes.tolist()]),
            f"{path}.qzeros": signed_words([_awq_line(line) for line in self.zeros.tolist()]),
            f"{path}.scales": self.scales,
        }


def _awq_line(codes: Sequence[int]) -> list[int]:
    words = []
    for start in range(0, len(codes), 8):
        word = 0
        for nibble, column in enumerate(AWQ_COLUMN_OF_NIBBLE):
            word |= codes[start + column] << (4 * nibble)
        words.append(word)
    return words


def random_integers(
    *,
    inputs: int = 64,
    outputs: int = 32,
    bits: int = 4,
    group_size: int = 16,
    symmetric: bool = False,
    shuffled: bool = False,
    seed: int = 0,
) -> IntegerMatrix:
    """group_size: -1 for one group. shuffled: whether groups are spread over the inputs, as act-order does."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(inputs) // (inputs if group_size == -1 else group_size)
    num_groups = int(groups.max()) + 1
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=generator)]
    zeros = torch.randint(0, 1 << bits, (num_groups, outputs), generator=generator)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    return IntegerMatrix(
        codes=torch.randint(0, 1 << bits, (inputs, outputs), generator=generator),
        zeros=zeros,
        scales=(torch.rand((num_groups, outputs), generator=generator) / 16 + 0.01).to(torch.float16),
        groups=groups,
        bits=bits,
    )
