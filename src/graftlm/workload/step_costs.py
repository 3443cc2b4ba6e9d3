"""What an engine's steps take, as a few numbers that a simulator can add up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graftlm.engine.engine import Engine
from graftlm.routing.costs import StepCosts
from graftlm.workload.run import run_workload
from graftlm.workload.workload import Workload

# Few and many sequences, without and with adapters: enough to tell the four parts of a step apart.
_SIZES = (1, 4, 16)
_OUTPUT_TOKENS = 12
# Of steps that compute the same the shortest counts: what else the machine does is not theirs.
_REPEATS = 3
_PROBE = "graft-costs-probe"
# Sequences that decode, prompt tokens, adapters.
_Shape = tuple[int, int, int]


def measure_costs(engine: Engine, adapter: Path, *, prompt_tokens: int, seed: int = 0) -> StepCosts:
    """Run a few batches and fit `StepCosts` to their steps; read an adapter and time that.

    Args:
        engine: with its model in this process, a prefix cache that is off, adapters, and nothing else to do.
        adapter: one to be read.

    Raises:
        InvalidRequest, ContextLengthExceeded, AdapterError, StepFailed
    """
    names = tuple(engine.adapters)
    shortest: dict[_Shape, float] = {}
    for _ in range(_REPEATS):
        for size in _SIZES:
            for chosen in ((), names):
                workload = Workload(
                    num_requests=size,
                    prompt_tokens=prompt_tokens,
                    output_tokens=_OUTPUT_TOKENS,
                    adapters=chosen,
                    seed=seed,
                )
                for step in run_workload(engine, workload).steps:
                    shape = (step.decode_rows, step.prompt_rows, min(size, len(chosen)))
                    shortest[shape] = min(step.seconds, shortest.get(shape, step.seconds))
    begun = time.perf_counter()
    loaded = engine.load_adapter(_PROBE, adapter)
    seconds = time.perf_counter() - begun
    engine.unload_adapter(_PROBE)
    constant, row, prompt_token, own_adapter = _fit(shortest)
    return StepCosts(
        step_seconds=constant,
        row_seconds=row,
        prompt_token_seconds=prompt_token,
        adapter_seconds=own_adapter,
        # Nearly all of it is reading and compiling tensors.
        load_seconds=0.0,
        load_byte_seconds=seconds / loaded.num_bytes,
    )


def _fit(shortest: Mapping[_Shape, float]) -> tuple[float, float, float, float]:
    """Least squares of the relative errors; parts that would be negative are nought."""
    seconds = np.array(list(shortest.values()))
    scaled = np.array([(1, *shape) for shape in shortest], dtype=float) / seconds[:, None]
    used = [0, 1, 2, 3]
    while True:
        solution, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)
        if (solution >= 0).all():
            break
        del used[int(np.argmin(solution))]
    costs = dict(zip(used, map(float, solution), strict=True))
    return costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0), costs.get(3, 0.0)
