"""How compressed-tensors lays codes of less than 32 bits into words of 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.quantization.packed_codes import PackedCodes

WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class WordPacking:
    """padded: whether a word ends with the last code that fits whole, as version 0.12 still packs; else codes run on
    across words. With 1, 2, 4 and 8 bits there is no difference."""

    bits: int
    padded: bool

    def num_words(self, count: int) -> int:
        if self.padded:
            return -(-count // (WORD_BITS // self.bits))
        return -(-count * self.bits // WORD_BITS)

    def codes(self, words: Tensor, count: int) -> PackedCodes:
        """words: int32 [rows, num_words(count)] -> [rows, count]."""
        if not self.padded:
            return PackedCodes.from_words(words, count, self.bits)
        shifts = torch.arange(WORD_BITS // self.bits, dtype=torch.int32, device=words.device) * self.bits
        codes = (words[..., None] >> shifts) & ((1 << self.bits) - 1)
        return PackedCodes.pack(codes.to(torch.uint8).flatten(1)[:, :count], self.bits)


# Codes that run on come first: a few lengths below 64, which no real matrix has, could be either.
WORD_PACKINGS = tuple(WordPacking(bits=bits, padded=padded) for padded in (False, True) for bits in range(1, 9))
