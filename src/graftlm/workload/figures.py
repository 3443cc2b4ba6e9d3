"""A run's figures, and the medians over several runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from graftlm.workload.machine_limits import MachineLimits
from graftlm.workload.model_cost import ModelCost
from graftlm.workload.run import Step, WorkloadRun


@dataclass(frozen=True, kw_only=True)
class Figures:
    """None: there is nothing to take the figure of, such as steps without prompts if each answer is one token.

    output_tokens_per_second: of the whole run, prompts included in its time. prompt_tokens_per_second: prompt tokens
        over the time of the steps that had any. decode_tokens_per_second: tokens of the other steps over their time.
    first_token_seconds: median over the requests. inter_token_p50_seconds, inter_token_p95_seconds: between two tokens
        of a request, of all requests.
    prompt_step_seconds, decode_step_seconds: medians of the steps with prompt tokens, and of the others.
    decode_bandwidth_share: bytes the decode steps read at the least, over what the limit allows in their time.
    decode_flops_share, prompt_flops_share: the matrices' operations likewise, of decode steps and of those with
        prompts.
    """

    output_tokens_per_second: float
    prompt_tokens_per_second: float
    decode_tokens_per_second: float | None
    first_token_seconds: float
    inter_token_p50_seconds: float | None
    inter_token_p95_seconds: float | None
    prompt_step_seconds: float
    decode_step_seconds: float | None
    decode_bandwidth_share: float | None
    decode_flops_share: float | None
    prompt_flops_share: float | None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """How one field of `Figures` is shown: `show` turns its value to text."""

    name: str
    label: str
    show: Callable[[float], str]


def _per_second(value: float) -> str:
    return f"{value:.1f}"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.2f} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


FIGURES: tuple[Figure, ...] = (
    Figure(name="prompt_tokens_per_second", label="prompt tokens/s", show=_per_second),
    Figure(name="output_tokens_per_second", label="output tokens/s, prompts' time included", show=_per_second),
    Figure(name="decode_tokens_per_second", label="output tokens/s, decode steps alone", show=_per_second),
    Figure(name="first_token_seconds", label="time to first token, p50", show=_milliseconds),
    Figure(name="inter_token_p50_seconds", label="between tokens, p50", show=_milliseconds),
    Figure(name="inter_token_p95_seconds", label="between tokens, p95", show=_milliseconds),
    Figure(name="prompt_step_seconds", label="step with prompt tokens", show=_milliseconds),
    Figure(name="decode_step_seconds", label="decode step", show=_milliseconds),
    Figure(name="decode_bandwidth_share", label="decode steps, of the bandwidth limit", show=_percent),
    Figure(name="decode_flops_share", label="decode steps, of the FLOP limit", show=_percent),
    Figure(name="prompt_flops_share", label="prompt steps, of the FLOP limit", show=_percent),
)


def summarize(
    run: WorkloadRun,
    *,
    limits: MachineLimits,
    cost: ModelCost | None = None,
    adapter_bytes: int = 0,
    adapter_weights: int = 0,
) -> Figures:
    """A run's figures.

    Args:
        cost: of its model; None leaves the shares of the limits out.
        adapter_bytes: of the adapters that had requests, together. adapter_weights: elements one row meets of them.
    """
    prompt_steps = [step for step in run.steps if step.prompt_rows]
    decode_steps = [step for step in run.steps if step.decode_rows and not step.prompt_rows]
    gaps = [later - earlier for times in run.token_times for earlier, later in pairwise(times)]

    def flops_share(steps: Sequence[Step]) -> float | None:
        if cost is None or not steps:
            return None
        return cost.step_flops(steps, adapter_weights=adapter_weights) / _seconds(steps) / limits.flops

    bandwidth_share = None
    if cost is not None and decode_steps:
        num_bytes = sum(cost.step_bytes(step, adapter_bytes=adapter_bytes) for step in decode_steps)
        bandwidth_share = num_bytes / _seconds(decode_steps) / limits.bytes_per_second
    return Figures(
        output_tokens_per_second=sum(map(len, run.token_times)) / run.seconds,
        prompt_tokens_per_second=sum(step.prompt_rows for step in prompt_steps) / _seconds(prompt_steps),
        decode_tokens_per_second=sum(step.decode_rows for step in decode_steps) / _seconds(decode_steps)
        if decode_steps
        else None,
        first_token_seconds=statistics.median(times[0] for times in run.token_times),
        inter_token_p50_seconds=float(np.percentile(gaps, 50)) if gaps else None,
        inter_token_p95_seconds=float(np.percentile(gaps, 95)) if gaps else None,
        prompt_step_seconds=statistics.median(step.seconds for step in prompt_steps),
        decode_step_seconds=statistics.median(step.seconds for step in decode_steps) if decode_steps else None,
        decode_bandwidth_share=bandwidth_share,
        decode_flops_share=flops_share(decode_steps),
        prompt_flops_share=flops_share(prompt_steps),
    )


def median_figures(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over runs of one workload, of which there is at least one."""
    medians: dict[str, Any] = {
        field.name: _median(getattr(run, field.name) for run in runs) for field in fields(Figures)
    }
    return Figures(**medians)


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _seconds(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps)
