"""What processes that share the layers out by tensors ask of each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class CollectiveFailed(Exception):
    """Another rank is gone, or does not answer; this group computes nothing any more."""


class Collective(Protocol):
    """A group of `size` ranks that make the same calls in the same order. Every rank gets the same bits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in `partial`'s dtype; `partial` may be written to.

        Raises:
            CollectiveFailed
        """
        ...

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks; all have one shape.

        Raises:
            CollectiveFailed
        """
        ...

    def close(self) -> None:
        """Leave the group: whoever waits for this rank fails. May be called twice and from any thread."""
        ...
