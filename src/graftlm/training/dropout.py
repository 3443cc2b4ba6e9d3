"""LoRA's dropout: which elements of their inputs the low-rank updates do not see in one pass of an update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """rate: probability that an element is left out. seed: the job's. step: updates made before.

    lengths: rows of each document of the pass. num_targets: those of them that the output head sees.
    first_document: number of the first document in the update.

    What is drawn for a document depends on its place in the update and on nothing else: it is the same whichever passes
    the update is divided into, whatever jobs share them, in a layer that is computed again, and after a resumption.
    """

    rate: float
    seed: int
    step: int
    lengths: tuple[int, ...]
    num_targets: tuple[int, ...]
    first_document: int

    @property
    def gain(self) -> float:
        """What remains is multiplied with this, so that its expectation is the whole."""
        return 1 / (1 - self.rate)

    def mask(self, path: str) -> DroppedInputs:
        """The mask of one module's input."""
        return DroppedInputs(dropout=self, path=path, lengths=self.lengths)

    def head_mask(self, path: str) -> DroppedInputs:
        """The mask of the output head's input."""
        return DroppedInputs(dropout=self, path=path, lengths=self.num_targets)


@dataclass(frozen=True, kw_only=True)
class DroppedInputs:
    """An `InputMask`. It leaves the scale to those who use it: a factor is exact in few dtypes, zero in all.

    lengths: rows of each document. first_row: that inputs begin with.
    """

    dropout: Dropout
    path: str
    lengths: tuple[int, ...]
    first_row: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows from the first on, in]."""
        draws = [
            torch.empty((length, x.shape[1]), dtype=torch.bool).bernoulli_(
                self.dropout.rate, generator=self._generator(number)
            )
            for number, length in enumerate(self.lengths, start=self.dropout.first_document)
        ]
        dropped = torch.cat(draws)[self.first_row : self.first_row + len(x)]
        return x.masked_fill(dropped.to(x.device), 0)

    def from_row(self, row: int) -> DroppedInputs:
        return replace(self, first_row=self.first_row + row)

    def _generator(self, document: int) -> torch.Generator:
        key = f"{self.dropout.seed}/{self.dropout.step}/{document}/{self.path}"
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        return torch.Generator().manual_seed(number)
