"""What an engine does beside its requests."""

from __future__ import annotations

from typing import Protocol


class SideWork(Protocol):
    """Done in the engine's thread, a piece at a time, between its steps."""

    @property
    def has_work(self) -> bool:
        """Whether there is a piece to do."""
        ...

    def step(self, *, is_serving: bool) -> None:
        """Do one piece, or none if it would take too long.

        Args:
            is_serving: requests wait for it to end.
        """
        ...
