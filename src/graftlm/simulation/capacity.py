"""What a worker could compute at best."""

from __future__ import annotations

import math

from graftlm.routing.costs import StepCosts
from graftlm.simulation.traffic import Traffic
from graftlm.simulation.worker import WorkerSize


def requests_per_second(traffic: Traffic, size: WorkerSize, costs: StepCosts) -> float:
    """Of one worker whose every step is full of sequences with adapters of their own, and to which no adapter is ever
    missing. What a cluster is asked for is given as a part of this."""
    # The mean of a log-normal; what is cut off its tail is little.
    stretch = math.exp(traffic.length_sigma**2 / 2)
    rows = size.max_num_seqs
    tokens = traffic.output_tokens * stretch * costs.step(rows=rows, adapters=rows) / rows
    prompt = (traffic.prompt_tokens * stretch + traffic.shared_tokens) * costs.prompt_token_seconds
    return 1 / (tokens + prompt)
