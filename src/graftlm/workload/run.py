"""Running a workload: one engine, step by step, with a clock beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from graftlm.engine.engine import Engine
from graftlm.engine.job import Job
from graftlm.engine.outputs import RequestFailure
from graftlm.engine.sampling_params import SamplingParams
from graftlm.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Step:
    """seconds: it took. prompt_rows, decode_rows: tokens it computed of prompts, and of answers.
    contexts: of each sequence that got a token, how many tokens it attended to."""

    seconds: float
    prompt_rows: int
    decode_rows: int
    contexts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorkloadRun:
    """steps: in their order. token_times: of each request, when its tokens came, in seconds since all were sent.
    token_ids: of each request, its answer."""

    workload: Workload
    steps: tuple[Step, ...]
    token_times: tuple[tuple[float, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def seconds(self) -> float:
        """From the sending of all requests to the last token."""
        return max(times[-1] for times in self.token_times)


def run_workload(engine: Engine, workload: Workload) -> WorkloadRun:
    """Send all requests of a workload at once and time every step and token. Nothing else may use the engine.

    Raises:
        InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError: it cannot be asked of this engine.
        StepFailed: something broke while it ran.
    """
    jobs = _make_jobs(engine, workload)
    requests = [job.requests[0] for job in jobs]
    steps: list[Step] = []
    times: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        engine.core.add(job)
    begun = time.perf_counter()
    last = begun
    try:
        while engine.core.has_work:
            before = [(request.num_computed_tokens, len(request.output_token_ids)) for request in requests]
            pending = [request.num_pending_tokens for request in requests]
            for item in engine.core.step():
                if isinstance(item, RequestFailure):
                    raise item.error
            now = time.perf_counter()
            prompt_rows = decode_rows = 0
            contexts = []
            for index, request in enumerate(requests):
                num_computed, num_outputs = before[index]
                got_token = len(request.output_token_ids) > num_outputs
                # Whatever ends gives its blocks back, so what it computed last is known from what was pending.
                rows = pending[index] if got_token else max(0, request.num_computed_tokens - num_computed)
                if num_outputs:
                    decode_rows += rows
                else:
                    prompt_rows += rows
                if got_token:
                    times[index].append(now - begun)
                    contexts.append(num_computed + rows)
            steps.append(
                Step(seconds=now - last, prompt_rows=prompt_rows, decode_rows=decode_rows, contexts=tuple(contexts))
            )
            last = now
    finally:
        engine.core.abort_all()
    return WorkloadRun(
        workload=workload,
        steps=tuple(steps),
        token_times=tuple(map(tuple, times)),
        token_ids=tuple(tuple(request.output_token_ids) for request in requests),
    )


def _make_jobs(engine: Engine, workload: Workload) -> Sequence[Job]:
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0, ignore_eos=True)
    jobs: list[Job] = []
    try:
        for index, prompt in enumerate(workload.prompts(len(engine.tokenizer))):
            jobs.append(engine.make_job({"prompt_token_ids": prompt}, params, workload.adapter_of(index)))
    except BaseException:
        for job in jobs:
            engine.discard(job)
        raise
    return jobs
