"""When things happened to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True, eq=False)
class RequestTimings:
    """In seconds of `time.perf_counter`; None for what has not happened. The engine's thread writes, any may read.

    arrived: it was checked. begun: it was first in a step. first_token: of any of its answers. ended: however.
    """

    arrived: float = field(default_factory=time.perf_counter)
    begun: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def begin(self) -> None:
        """Its tokens are in the next step, for the first time or again."""
        self.begun = self.begun or time.perf_counter()

    def produce(self) -> None:
        """An answer has one more token."""
        self.first_token = self.first_token or time.perf_counter()

    def end(self) -> None:
        """It is over."""
        self.ended = time.perf_counter()
