"""What a simulated run was like for those who asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftlm.simulation.cluster import SimulatedRun
from graftlm.simulation.worker import SimulatedRequest


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a request is promised.

    Args:
        first_token_seconds: until its first token.
        token_seconds: between two tokens, on average over the request.
    """

    first_token_seconds: float = 2.0
    token_seconds: float = 0.2

    def is_met(self, request: SimulatedRequest) -> bool:
        if request.first_token is None or request.ended is None:
            return False
        per_token = (request.ended - request.first_token) / max(1, request.output_tokens - 1)
        return request.first_token - request.arrived <= self.first_token_seconds and per_token <= self.token_seconds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of the requests that came after the beginning was over.

    attainment: the part for which the objective was met. wait_*: seconds from arrival until a request first computes.
    first_token_*: until its first token. latency_*: until its last. cold: the part whose adapter had to be read for it.
    loads_per_request: adapters that were read. unfinished: the part that was given up. p50, p95: percentiles; a request
    that never got there counts as infinitely late.
    """

    num_requests: int
    attainment: float
    wait_p50: float
    wait_p95: float
    first_token_p50: float
    first_token_p95: float
    latency_p50: float
    latency_p95: float
    cold: float
    loads_per_request: float
    unfinished: float


def summarize(run: SimulatedRun, objective: Objective, *, warm_up_seconds: float) -> Outcome:
    """Args: warm_up_seconds: requests that arrive before are not counted: every cache is still empty.

    Raises:
        ValueError: nothing came after.
    """
    counted = [request for request in run.requests if request.arrived >= warm_up_seconds]
    if not counted:
        raise ValueError("no request came after the beginning")

    def since_arrival(times: Iterable[float | None]) -> list[float]:
        return sorted(
            math.inf if time is None else time - request.arrived for request, time in zip(counted, times, strict=True)
        )

    waits = since_arrival(request.begun for request in counted)
    first_tokens = since_arrival(request.first_token for request in counted)
    latencies = since_arrival(request.ended for request in counted)
    return Outcome(
        num_requests=len(counted),
        attainment=sum(map(objective.is_met, counted)) / len(counted),
        wait_p50=percentile(waits, 50),
        wait_p95=percentile(waits, 95),
        first_token_p50=percentile(first_tokens, 50),
        first_token_p95=percentile(first_tokens, 95),
        latency_p50=percentile(latencies, 50),
        latency_p95=percentile(latencies, 95),
        cold=sum(request.was_cold for request in counted) / len(counted),
        loads_per_request=run.num_loads / len(run.requests),
        unfinished=sum(request.ended is None for request in counted) / len(counted),
    )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]
