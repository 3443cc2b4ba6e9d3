"""The engine's heart: one step schedules, computes, samples and turns tokens into text. Not thread-safe."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graftlm.adapters import Adapter, AdapterRegistry, active_from
from graftlm.engine.answer import describe_logprobs
from graftlm.engine.cache_blocks import CacheBlocks
from graftlm.engine.executor import AdapterUnavailable, CacheLost, Executor
from graftlm.engine.job import Job, delta
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.outputs import CompletionOutput, RequestFailure, RequestOutput, TokenLogprob
from graftlm.engine.request import Request
from graftlm.engine.sampler import SampledToken, row_logprobs, sample
from graftlm.engine.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from graftlm.errors import StepFailed

logger = logging.getLogger(__name__)


class EngineCore:
    """Owns the scheduler and the executor; knows every job that runs."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        blocks: CacheBlocks,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._blocks = blocks
        self._registry = registry
        self._metrics = metrics
        self._jobs: dict[str, Job] = {}
        self._job_of_request: dict[str, Job] = {}

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Requests that have blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    def add(self, job: Job) -> None:
        """Start a job. The core gives its adapter back to the registry when the job ends, however it ends."""
        if job.adapter is not None:
            self._executor.hold_adapter(job.adapter)
        self._jobs[job.job_id] = job
        for request in job.requests:
            self._job_of_request[request.request_id] = job
            self._scheduler.add(request)

    def abort(self, job_id: str) -> RequestOutput | None:
        """Stop a job where it is and free what it holds. None when it is unknown or has finished."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        running = [request for request in job.requests if request.finish_reason is None]
        for request in running:
            self._scheduler.finish(request.request_id, "abort")
        self._retire(job)
        return job.output(*(delta(request) for request in running))

    def abort_all(self) -> list[str]:
        """Stop every job; their ids."""
        job_ids = list(self._jobs)
        for job_id in job_ids:
            self.abort(job_id)
        return job_ids

    def step(self) -> list[RequestOutput | RequestFailure]:
        """Compute one step; a delta for each job of which an answer moved.

        If something breaks while the step is computed, memory that cannot be had included, the jobs in it fail and no
        others. What the step may have left half written is nobody's then: a block's content is noted in the prefix
        cache only after the step that filled it.
        """
        plan = self._scheduler.schedule()
        if not plan.sequences:
            return []
        job_ids = dict.fromkeys(self._job_of_request[sequence.request_id].job_id for sequence in plan.sequences)
        for job_id in job_ids:
            self._metrics.scheduled(self._jobs[job_id])
        begun = time.perf_counter()
        try:
            return self._compute(plan)
        except Exception as cause:
            logger.exception("a step failed; the requests in it are given up: %s", ", ".join(job_ids))
            # The frames hold the step's tensors, and the error outlives it.
            traceback.clear_frames(cause.__traceback__)
            return self._fail(job_ids, cause)
        finally:
            self._metrics.stepped(time.perf_counter() - begun)

    def _compute(self, plan: SchedulerOutput) -> list[RequestOutput | RequestFailure]:
        try:
            logits = self._executor.execute(plan.sequences)
        except CacheLost:
            self._start_over()
            return []
        except AdapterUnavailable as unavailable:
            return self._give_up(unavailable)
        tokens = self._sample(plan, logits)
        token_ids = {name: None if token is None else token.token_id for name, token in tokens.items()}
        moved = self._scheduler.update(plan, token_ids)
        answers: dict[str, list[CompletionOutput]] = {}
        for request in moved:
            job = self._job_of_request[request.request_id]
            answers.setdefault(job.job_id, []).append(self._answer(job, request, tokens.get(request.request_id)))
        return [self._report(self._jobs[job_id], deltas) for job_id, deltas in answers.items()]

    def _fail(self, job_ids: Iterable[str], cause: Exception) -> list[RequestOutput | RequestFailure]:
        failures: list[RequestOutput | RequestFailure] = []
        for job_id in job_ids:
            self.abort(job_id)
            error = StepFailed("the engine failed while computing this request", do="send it again")
            error.__cause__ = cause
            failures.append(RequestFailure(request_id=job_id, error=error))
        return failures

    def logits(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        """Logits of every position of one sequence, [T, V] float32, outside any job."""
        virtual: tuple[int, ...] = ()
        if adapter is not None:
            self._executor.hold_adapter(adapter)
            virtual = adapter.virtual_token_ids
        try:
            while True:
                try:
                    return self._whole_sequence((*virtual, *token_ids), adapter)[len(virtual) :]
                except CacheLost:
                    self._start_over()
        except AdapterUnavailable as unavailable:
            raise unavailable.error from unavailable
        finally:
            if adapter is not None:
                self._executor.release_adapter(adapter)

    def _start_over(self) -> None:
        """Go on after the cache was lost: what requests have generated so far is known here, and all that is needed."""
        self._scheduler.start_over()
        self._executor.recover()

    def _give_up(self, unavailable: AdapterUnavailable) -> list[RequestOutput | RequestFailure]:
        """End the jobs whose adapter cannot be had."""
        users = [job for job in self._jobs.values() if job.adapter and job.adapter.digest == unavailable.digest]
        for job in users:
            self.abort(job.job_id)
        return [RequestFailure(request_id=job.job_id, error=unavailable.error) for job in users]

    def _whole_sequence(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        """Logits of every row, computed in chunks of one step each."""
        tables = self._blocks.empty_tables()
        rows = []
        try:
            for start in range(0, len(token_ids), self._blocks.chunk_tokens):
                chunk = tuple(token_ids[start : start + self._blocks.chunk_tokens])
                self._blocks.extend(tables, num_computed=start, num_tokens=len(token_ids))
                sequence = ScheduledSequence(
                    request_id="logits",
                    adapter_digest=None if adapter is None else adapter.digest,
                    token_ids=chunk,
                    start=start,
                    active_from=active_from(token_ids, adapter),
                    prompt_len=len(token_ids),
                    sequence_len=len(token_ids),
                    block_tables=tuple(tuple(table.blocks) for table in tables),
                    num_logits=len(chunk),
                )
                rows.append(self._executor.execute([sequence]))
                self._blocks.drop_behind(tables, num_computed=sequence.stop)
        finally:
            self._blocks.release(tables)
        return torch.cat(rows)

    def _sample(self, plan: SchedulerOutput, logits: Tensor) -> dict[str, SampledToken | None]:
        """A token for every sequence that caught up with itself in this step."""
        rows: list[int] = []
        requests: list[Request] = []
        start = 0
        for sequence in plan.sequences:
            request = self._scheduler.get(sequence.request_id)
            stop = start + sequence.num_logits
            if request.wants_prompt_logits:
                self._record_prompt_logprobs(request, sequence.start, logits[start:stop])
            if sequence.stop == request.num_tokens and request.max_tokens > 0:
                rows.append(stop - 1)
                requests.append(request)
            start = stop
        wanted = logits if len(rows) == len(logits) else logits[rows]
        tokens = sample(wanted, requests)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}

    def _record_prompt_logprobs(self, request: Request, start: int, rows: Tensor) -> None:
        """Row i predicts the prompt's token at start + i + 1. The n answers share the result and a preempted request
        comes by again, so only what is not there yet is recorded."""
        job = self._job_of_request[request.request_id]
        prompt, recorded = job.prompt_token_ids, job.prompt_logprobs
        if not recorded:
            recorded.append(TokenLogprob(token_id=prompt[0], text=job.tokenizer.token_text(prompt[0]), logprob=None))
        for position, row in enumerate(rows, start + 1 - request.num_virtual_tokens):
            if position == len(recorded) and position < len(prompt):
                described = row_logprobs(row.log_softmax(dim=-1), prompt[position], request.params.prompt_logprobs or 0)
                recorded.append(describe_logprobs(prompt[position], described, job.tokenizer))

    def _answer(self, job: Job, request: Request, token: SampledToken | None) -> CompletionOutput:
        """The delta of an answer that got a token, or that ended without one (max_tokens 0)."""
        answer = job.texts[request.index]
        text = "" if token is None else answer.push(token.token_id)
        if answer.matched_stop is not None:
            # A stop string outranks the length limit it may coincide with.
            self._scheduler.finish(request.request_id, "stop")
            request.finish_reason, request.stop_reason = "stop", answer.matched_stop
        if request.finish_reason is not None:
            text += answer.flush()
        logprobs = None
        if token is not None:
            self._metrics.produced(job, request.index, 1)
        if token is not None and token.logprobs is not None:
            logprobs = (describe_logprobs(token.token_id, token.logprobs, job.tokenizer),)
        return delta(request, text, () if token is None else (token.token_id,), logprobs)

    def _report(self, job: Job, deltas: Sequence[CompletionOutput]) -> RequestOutput:
        """What moved of a job, all its answers together: several may end in one step, and the last ends the job."""
        if job.finished:
            self._retire(job)
        return job.output(*deltas)

    def _retire(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self._metrics.ended(job)
        for request in job.requests:
            del self._job_of_request[request.request_id]
        if job.adapter is not None:
            self._executor.release_adapter(job.adapter)
            self._registry.release(job.adapter)
