"""LoRA's dropout: which elements of their inputs the low-rank updates do not see in one pass of an update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """rate: probability that an element is left out. seed: the job's. step: updates made before.

    lengths: rows of each document of the pass. first_document: number of the first of them in the update.

    What is drawn for a document depends on its place in the update and on nothing else: it is the same whichever passes
    the update is divided into, whatever jobs share them, in a layer that is computed again, and after a resumption.
    """

    rate: float
    seed: int
    step: int
    lengths: tuple[int, ...]
    first_document: int

    @property
    def gain(self) -> float:
        """What remains is multiplied with this, so that its expectation is the whole."""
        return 1 / (1 - self.rate)

    def mask(self, path: str) -> DroppedInputs:
        """The mask of one module's input."""
        return DroppedInputs(dropout=self, path=path)


@dataclass(frozen=True, kw_only=True)
class DroppedInputs:
    """An `InputMask`. It leaves the scale to those who use it: a factor is exact in few dtypes, zero in all."""

    dropout: Dropout
    path: str

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows of the pass, in]."""
        draws = [
            torch.empty((length, x.shape[1]), dtype=torch.bool).bernoulli_(
                self.dropout.rate, generator=self._generator(number)
            )
            for number, length in enumerate(self.dropout.lengths, start=self.dropout.first_document)
        ]
        return x.masked_fill(torch.cat(draws).to(x.device), 0)

    def _generator(self, document: int) -> torch.Generator:
        key = f"{self.dropout.seed}/{self.dropout.step}/{document}/{self.path}"
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        return torch.Generator().manual_seed(number)
