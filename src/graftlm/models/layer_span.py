"""A stretch of a decoder's layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerSpan:
    """Layers [start, stop) of a decoder that has `num_layers`.

    Raises:
        ValueError: it is empty, or not within the decoder.
    """

    start: int
    stop: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.num_layers:
            raise ValueError(f"[{self.start}, {self.stop}) is no stretch of {self.num_layers} layers")

    @property
    def is_first(self) -> bool:
        """Whether the token embedding belongs to it."""
        return self.start == 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the decoder."""
        return self.is_first and self.is_last

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the output head belong to it."""
        return self.stop == self.num_layers
