"""Small integers packed without gaps, a row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Eight codes of b bits fill b bytes exactly, so that the place of a code inside its bytes depends on its index mod 8.
LANES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCodes:
    """A matrix of unsigned integers below 2**bits.

    Code k of a row holds the bits [k * bits, (k + 1) * bits) of the row's bytes, counted from the lowest bit of the
    first byte. Words of 32 bits that are filled from their lowest bit are the same bytes in a little-endian file.

    stream: uint8 [rows, ceil(columns / 8) * bits]. bits: 1 to 8.
    """

    stream: Tensor
    columns: int
    bits: int

    @classmethod
    def pack(cls, codes: Tensor, bits: int) -> PackedCodes:
        """codes: uint8 [rows, columns], each below 2**bits."""
        rows, columns = codes.shape
        lanes = functional.pad(codes, (0, -columns % LANES)).view(rows, -(-columns // LANES), LANES)
        stream = torch.zeros((rows, lanes.shape[1], bits), dtype=torch.uint8, device=codes.device)
        for lane in range(LANES):
            byte, shift = divmod(lane * bits, 8)
            stream[..., byte] |= lanes[..., lane] << shift
            if shift + bits > 8:
                stream[..., byte + 1] |= lanes[..., lane] >> (8 - shift)
        return cls(stream=stream.flatten(1), columns=columns, bits=bits)

    @classmethod
    def from_bytes(cls, stream: Tensor, columns: int, bits: int) -> PackedCodes:
        """stream: uint8 [rows, ...], as above but for the length of its rows. Shares their memory where they are long
        enough."""
        length = -(-columns // LANES) * bits
        missing = length - stream.shape[1]
        if missing > 0:
            stream = functional.pad(stream, (0, missing))
        return cls(stream=stream[:, :length], columns=columns, bits=bits)

    @classmethod
    def from_words(cls, words: Tensor, columns: int, bits: int) -> PackedCodes:
        """words: int32 [rows, ceil(columns * bits / 32)], filled from their lowest bits."""
        # Flat first: a single column counts as contiguous with any stride, but cannot be viewed as bytes.
        stream = words.flatten().view(torch.uint8).view(words.shape[0], words.shape[1] * 4)
        return cls.from_bytes(stream, columns, bits)

    def words(self) -> Tensor:
        """int32 [rows, ceil(columns * bits / 32)]: undoes `from_words`."""
        length = -(-self.columns * self.bits // 32) * 4
        missing = length - self.stream.shape[1]
        stream = functional.pad(self.stream, (0, missing)) if missing > 0 else self.stream[:, :length]
        return stream.contiguous().view(torch.int32)

    def unpack(self) -> Tensor:
        """uint8 [rows, columns]."""
        rows, length = self.stream.shape
        stream = self.stream.view(rows, length // self.bits, self.bits)
        lanes = torch.empty((rows, length // self.bits, LANES), dtype=torch.uint8, device=stream.device)
        for lane in range(LANES):
            byte, shift = divmod(lane * self.bits, 8)
            code = stream[..., byte] >> shift
            if shift + self.bits > 8:
                code |= stream[..., byte + 1] << (8 - shift)
            lanes[..., lane] = code
        lanes &= (1 << self.bits) - 1
        return lanes.flatten(1)[:, : self.columns]

    def pick(self, rows: slice | Tensor) -> PackedCodes:
        """Some of the rows; those of a slice share memory."""
        return PackedCodes(stream=self.stream[rows], columns=self.columns, bits=self.bits)
