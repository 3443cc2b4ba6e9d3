"""What a worker's steps take, as far as routing and simulation need to know."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from graftlm.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a step, and of reading an adapter.

    A step takes `step_seconds`, `row_seconds` for each sequence that decodes, `prompt_token_seconds` for each prompt
    token and `adapter_seconds` for each adapter among its rows. Reading an adapter takes `load_seconds`, and
    `load_byte_seconds` for each byte.

    Raises:
        ConfigurationError: one of them is negative or not finite, or a step takes no time at all.
    """

    step_seconds: float = 0.02
    row_seconds: float = 0.001
    prompt_token_seconds: float = 0.0005
    adapter_seconds: float = 0.001
    load_seconds: float = 0.1
    load_byte_seconds: float = 1e-9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigurationError(f"{field.name} is no time", got=repr(value), allowed="0 seconds or more")
        if self.step_seconds + self.row_seconds == 0:
            raise ConfigurationError("a step takes no time", do="set step_seconds or row_seconds")

    def step(self, *, rows: int, prompt_tokens: int = 0, adapters: int = 0) -> float:
        """Seconds of one step."""
        return (
            self.step_seconds
            + self.row_seconds * rows
            + self.prompt_token_seconds * prompt_tokens
            + self.adapter_seconds * adapters
        )

    def load(self, num_bytes: int) -> float:
        """Seconds of reading an adapter."""
        return self.load_seconds + self.load_byte_seconds * num_bytes
