"""What is asked of an engine when its speed is measured. Plain data; no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from graftlm.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that all arrive at once.

    num_requests: of `prompt_tokens` random tokens each, answered greedily with exactly `output_tokens`.
    adapters: take turns, so that each gets an equal share of the requests; empty: the base answers.

    Raises:
        ConfigurationError: a number is below 1.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    adapters: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be a positive integer", got=getattr(self, name))

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The same for the same seed. vocab_size: ids are below it."""
        generator = random.Random(self.seed)
        return [[generator.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]

    def adapter_of(self, index: int) -> str | None:
        """Who answers a request; None is the base."""
        return self.adapters[index % len(self.adapters)] if self.adapters else None

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """Those that have a request: with fewer requests than adapters, not all of them."""
        return self.adapters[: self.num_requests]
