"""Requests that come to a simulated cluster."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, fields

from graftlm.errors import ConfigurationError
from graftlm.routing.worker_table import RoutedRequest

# Lengths are cut there, in medians: a tail, but no request that is the whole run.
_LONGEST = 8.0
_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Whom requests are for, and how long they are.

    Args:
        requests_per_second: on average, all of them together.
        seconds: for which requests come.
        num_adapters: that requests are for.
        zipf: how much the popular adapters get: the one of rank r is asked for in proportion to 1 / r^zipf.
        base_share: of requests that are for the base, from 0 to 1.
        adapter_bytes: of each adapter.
        burstiness: coefficient of variation of the times between requests; 1 is Poisson.
        prompt_tokens, output_tokens: medians.
        length_sigma: of the logarithms of both (log-normal); 0 makes all alike.
        shared_tokens: of each prompt, those that all prompts for its adapter begin with.
        drift_seconds: after which every adapter's popularity is that of its neighbour; 0 is never.
        seed: of all of it.

    Raises:
        ConfigurationError: a number has no meaning.
    """

    requests_per_second: float
    seconds: float = 60.0
    num_adapters: int = 400
    zipf: float = 1.0
    base_share: float = 0.0
    adapter_bytes: int = 10_000_000
    burstiness: float = 1.0
    prompt_tokens: int = 64
    output_tokens: int = 32
    length_sigma: float = 0.5
    shared_tokens: int = 0
    drift_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in {
                "zipf", "base_share", "length_sigma", "shared_tokens", "drift_seconds", "adapter_bytes", "seed",
            }  # fmt: skip
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                allowed = "0 or more" if may_be_zero else "more than 0"
                raise ConfigurationError(f"{field.name} is out of range", got=repr(value), allowed=allowed)
        if self.base_share > 1:
            raise ConfigurationError("base_share is a share", got=self.base_share, allowed="0 to 1")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, and how many tokens it will have: its sender knows no more than the most it asked for."""

    time: float
    request: RoutedRequest
    output_tokens: int


def arrivals(traffic: Traffic) -> Iterator[Arrival]:
    """All requests, in the order in which they come. The same traffic gives the same ones."""
    chance = random.Random(traffic.seed)
    weights = list(itertools.accumulate((rank + 1) ** -traffic.zipf for rank in range(traffic.num_adapters)))
    shape = traffic.burstiness**-2
    now = 0.0
    while True:
        now += chance.gammavariate(shape, 1 / (shape * traffic.requests_per_second))
        if now > traffic.seconds:
            return
        adapter = None
        if chance.random() >= traffic.base_share:
            rank = bisect(weights, chance.random() * weights[-1])
            shift = int(now / traffic.drift_seconds) if traffic.drift_seconds else 0
            adapter = f"adapter-{(rank + shift) % traffic.num_adapters}"
        prompt = _length(chance, traffic.prompt_tokens, traffic.length_sigma)
        output = _length(chance, traffic.output_tokens, traffic.length_sigma)
        yield Arrival(
            time=now,
            request=RoutedRequest(
                adapter=adapter,
                adapter_bytes=0 if adapter is None else traffic.adapter_bytes,
                prompt_tokens=prompt + traffic.shared_tokens,
                # What clients write as max_tokens: a round number above what they need.
                output_tokens=_next_power_of_two(output),
                prefix=tuple(hash((adapter, index)) for index in range(traffic.shared_tokens // _BLOCK_TOKENS)),
                block_size=_BLOCK_TOKENS,
            ),
            output_tokens=output,
        )


def _length(chance: random.Random, median: int, sigma: float) -> int:
    return max(1, round(median * min(_LONGEST, chance.lognormvariate(0.0, sigma))))


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
