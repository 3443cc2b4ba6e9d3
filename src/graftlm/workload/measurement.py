"""Workloads measured in turn on one engine, with the machine's limits beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graftlm.engine.engine import Engine
from graftlm.kernels.registry import choose_kernels
from graftlm.workload.figures import Figures, median_figures, summarize
from graftlm.workload.machine_limits import MachineLimits, measure_limits
from graftlm.workload.model_cost import ModelCost
from graftlm.workload.run import WorkloadRun, run_workload
from graftlm.workload.workload import Workload

# Of the run that is not counted: it finds threads and compiles what is compiled.
WARM_UP_REQUESTS, WARM_UP_TOKENS = 2, 4


@dataclass(frozen=True, kw_only=True)
class MeasuredWorkload:
    """runs: the figures of each repeat. medians: over them."""

    workload: Workload
    runs: tuple[Figures, ...]
    medians: Figures


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """dtype: that is computed in. kernels: by name. weight_bytes: of all matrices; None for a mixture of experts."""

    model: str
    dtype: str
    kernels: str
    weight_bytes: int | None
    limits: MachineLimits
    workloads: tuple[MeasuredWorkload, ...]


def measure_workloads(engine: Engine, workloads: Sequence[Workload], *, repeats: int) -> Measurement:
    """Run each workload `repeats` times, taking turns, so that a slow minute of the machine hits all of them.

    Args:
        engine: with its model in this process, a prefix cache that is off, and nothing else to do.

    Raises:
        ConfigurationError: the model is not in this process.
        InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError, StepFailed
    """
    decoder = engine.whole_base.decoder
    cost = ModelCost.of(decoder)
    for workload in workloads:
        run_workload(
            engine,
            replace(
                workload,
                num_requests=min(workload.num_requests, WARM_UP_REQUESTS),
                output_tokens=min(workload.output_tokens, WARM_UP_TOKENS),
            ),
        )
    limits = measure_limits(decoder.device, decoder.dtype)
    runs: list[list[WorkloadRun]] = [[] for _ in workloads]
    for _ in range(repeats):
        for own, workload in zip(runs, workloads, strict=True):
            own.append(run_workload(engine, workload))
        limits = limits.best(measure_limits(decoder.device, decoder.dtype))
    return Measurement(
        model=engine.model_name,
        dtype=str(decoder.dtype).removeprefix("torch."),
        kernels=choose_kernels(decoder.device, deterministic=engine.config.deterministic).name,
        weight_bytes=None if cost is None else cost.weight_bytes,
        limits=limits,
        workloads=tuple(_measured(engine, own, limits, cost) for own in runs),
    )


def _measured(
    engine: Engine, runs: Sequence[WorkloadRun], limits: MachineLimits, cost: ModelCost | None
) -> MeasuredWorkload:
    workload = runs[0].workload
    adapter_bytes = [engine.adapters[name].num_bytes for name in workload.active_adapters]
    figures = tuple(
        summarize(
            run,
            limits=limits,
            cost=cost,
            adapter_bytes=sum(adapter_bytes),
            # Adapters are float32 in memory, and a row meets one of them.
            adapter_weights=sum(adapter_bytes) // (4 * len(adapter_bytes)) if adapter_bytes else 0,
        )
        for run in runs
    )
    return MeasuredWorkload(workload=workload, runs=figures, medians=median_figures(figures))
