"""The engine's heart: steps are scheduled, computed, sampled and turned into text. Not thread-safe."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.adapters import Adapter, AdapterRegistry, AdapterWeights, LoadedAdapter, active_from
from graftlm.engine.adapter_loader import AdapterLoader
from graftlm.engine.answer import describe_logprobs
from graftlm.engine.cache_blocks import CacheBlocks
from graftlm.engine.executor import AdapterUnavailable, CacheLost, Executor, StepInFlight
from graftlm.engine.job import Job, delta
from graftlm.engine.mask_threads import Masks, MaskThreads, late
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.outputs import CompletionOutput, RequestFailure, RequestOutput, TokenLogprob
from graftlm.engine.request import Request
from graftlm.engine.residency import Residency
from graftlm.engine.sampler import SampledToken, rate, sample
from graftlm.engine.scheduler import AdapterLoad, ScheduledSequence, Scheduler, SchedulerOutput
from graftlm.errors import AdapterChanged, AdapterFilesNotFound, GraftError, InvalidRequest, StepFailed
from graftlm.kernels import ops
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import using

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Submitted:
    """A step in flight. masks: of its requests' next tokens. begun: when it was submitted, in seconds of
    `time.perf_counter`."""

    plan: SchedulerOutput
    masks: Masks
    step: StepInFlight
    begun: float


class EngineCore:
    """Owns the scheduler and the executor; knows every job that runs.

    kernels: what tokens are chosen with; the executor has its own.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        blocks: CacheBlocks,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
        residency: Residency[LoadedAdapter],
        loader: AdapterLoader,
        kernels: Kernels,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._blocks = blocks
        self._registry = registry
        self._metrics = metrics
        self._residency = residency
        self._loader = loader
        self._kernels = kernels
        self._masks = MaskThreads()
        self._num_loading = 0
        self._is_idle = False
        # The oldest first.
        self._in_flight: deque[_Submitted] = deque()
        self._jobs: dict[str, Job] = {}
        self._job_of_request: dict[str, Job] = {}

    @property
    def has_work(self) -> bool:
        """Whether there are jobs, or steps and loads that have not been seen to end."""
        return self._scheduler.has_work or bool(self._in_flight) or self._num_loading > 0

    @property
    def waits_for_loads(self) -> bool:
        """Whether the last step had nothing to compute until an adapter is there: the next one has not either."""
        return self._is_idle and self._num_loading > 0

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

    def abort_users(self, adapter: Adapter) -> list[RequestOutput]:
        """Stop every job of an adapter, or of a sum it is part of."""
        users = [job_id for job_id, job in self._jobs.items() if job.uses(adapter)]
        return [output for job_id in users if (output := self.abort(job_id)) is not None]

    def abort_all(self) -> list[str]:
        """Stop every job; their ids."""
        job_ids = list(self._jobs)
        for job_id in job_ids:
            self.abort(job_id)
        self._in_flight.clear()
        self._end_loads()
        return job_ids

    def step(self) -> list[RequestOutput | RequestFailure]:
        """Have as many steps in flight as the executor can use, and end the oldest: a delta for each job of which an
        answer moved, and a failure for each that cannot go on.

        If something breaks while a step is computed, memory that cannot be had included, the jobs in it fail and no
        others. What the step may have left half written is nobody's then: a block's content is noted in the prefix
        cache only after the step that filled it. If an adapter cannot be loaded, the jobs that wait for it fail.
        """
        failures = self._end_loads()
        self._is_idle = False
        while len(self._in_flight) < self._executor.depth:
            plan = self._scheduler.schedule()
            for load in plan.loads:
                self._start_load(load)
            if plan.is_empty:
                self._is_idle = not self._in_flight
                break
            failed = self._submit(plan)
            if failed is not None:
                return [*failures, *failed]
        return [*failures, *self._collect()] if self._in_flight else [*failures]

    def _submit(self, plan: SchedulerOutput) -> list[RequestFailure] | None:
        """Begin a step. None when it is in flight; else the failures that come of its not being so."""
        for job_id in self._job_ids(plan):
            self._begin(self._jobs[job_id])
        try:
            submitted = self._begin_step(plan)
        except AdapterUnavailable as unavailable:
            self._scheduler.withdraw(plan)
            return self._give_up(unavailable)
        except Exception as cause:
            return self._fail_step(plan, cause)
        if submitted is None:
            return []
        self._in_flight.append(submitted)
        return None

    def _begin_step(self, plan: SchedulerOutput) -> _Submitted | None:
        """None if the cache was lost: the step is to be planned again."""
        begun = time.perf_counter()
        requests = [(sequence, self._scheduler.get(sequence.request_id)) for sequence in plan.sequences]
        masks = self._masks.begin([request for sequence, request in requests if request.gets_token_at(sequence.stop)])
        try:
            step = self._executor.submit(plan.sequences, plan.replays)
        except CacheLost:
            self._recover()
            return None
        return _Submitted(plan=plan, masks=masks, step=step, begun=begun)

    def _collect(self) -> list[RequestOutput | RequestFailure]:
        """End the oldest step in flight."""
        # Not the step itself: the traceback of a failure keeps this frame, and a step its logits.
        plan, begun = self._in_flight[0].plan, self._in_flight[0].begun
        try:
            return self._end_step(self._in_flight.popleft())
        except Exception as cause:
            return [*self._fail_step(plan, cause)]
        finally:
            self._metrics.stepped(time.perf_counter() - begun)

    def _begin(self, job: Job) -> None:
        """Not in `_submit`, whose frame the traceback of a failure keeps, and a job its adapter."""
        if job.timings.begun is not None:
            return
        job.timings.begin()
        self._metrics.scheduled(job)

    def _job_ids(self, plan: SchedulerOutput) -> list[str]:
        """Of the jobs in a step that have not ended."""
        jobs = [self._job_of_request.get(request_id) for request_id in plan.request_ids]
        return list(dict.fromkeys([job.job_id for job in jobs if job is not None]))

    def _fail_step(self, plan: SchedulerOutput, cause: Exception) -> list[RequestFailure]:
        job_ids = self._job_ids(plan)
        logger.error("a step failed; the requests in it are given up: %s", ", ".join(job_ids), exc_info=cause)
        # The frames hold the step's tensors, and the error outlives it.
        traceback.clear_frames(cause.__traceback__)
        error = StepFailed("the engine failed while computing this request", do="send it again")
        error.__cause__ = cause
        return self._fail(job_ids, error)

    def _end_step(self, submitted: _Submitted) -> list[RequestOutput | RequestFailure]:
        plan, masks = submitted.plan, submitted.masks
        try:
            logits = submitted.step.logits()
        except CacheLost:
            self._recover()
            return []
        num_others = len(plan.request_ids) - len(masks) + len(self._in_flight)
        passed_over = late(masks, num_others=num_others) if masks else frozenset[str]()
        tokens = self._sample(plan, logits, passed_over)
        token_ids = {name: None if token is None else token.token_id for name, token in tokens.items()}
        moved = self._scheduler.update(plan, token_ids, passed_over)
        failures = self._fail_broken_grammars(moved)
        answers: dict[Job, list[CompletionOutput]] = {}
        for request in moved:
            job = self._job_of_request.get(request.request_id)
            if job is not None:
                answers.setdefault(job, []).append(self._answer(job, request, tokens.get(request.request_id)))
        self._metrics.produced(
            [(job, answer.index) for job, deltas in answers.items() for answer in deltas for _ in answer.token_ids]
        )
        return [*failures, *[self._report(job, deltas) for job, deltas in answers.items()]]

    def _fail_broken_grammars(self, moved: Iterable[Request]) -> list[RequestFailure]:
        """Give up the jobs whose grammar has led to where it cannot be followed."""
        failures: list[RequestFailure] = []
        for request in moved:
            error = None if request.grammar is None else request.grammar.error
            if error is not None and (job := self._job_of_request.get(request.request_id)) is not None:
                too_complex = InvalidRequest("the grammar became too complex to enforce", param="structured", got=error)
                failures += self._fail([job.job_id], too_complex)
        return failures

    def _fail(self, job_ids: Iterable[str], error: GraftError) -> list[RequestFailure]:
        failures = []
        for job_id in job_ids:
            self.abort(job_id)
            failures.append(RequestFailure(request_id=job_id, error=error))
        return failures

    def logits(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        """Logits of every position of one sequence, [T, V] float32, outside any job."""
        if adapter is None:
            return self._despite_losses(token_ids, None)
        self._make_resident(adapter)
        try:
            virtual = adapter.virtual_token_ids
            return self._despite_losses((*virtual, *token_ids), adapter)[len(virtual) :]
        finally:
            self._residency.unpin(adapter.digest)

    def close(self) -> None:
        """Let go of what runs beside the steps."""
        self._loader.close()
        self._masks.close()

    def _start_load(self, load: AdapterLoad) -> None:
        adapter = self._job_of_request[load.request_id].adapter
        assert adapter is not None
        # Whoever waits may give up; what is being read must not be forgotten meanwhile.
        self._registry.hold(adapter)
        self._num_loading += 1
        self._loader.start(adapter)

    def _end_loads(self) -> list[RequestFailure]:
        """Take what was read; give up the jobs that wait for what was not, and no others."""
        failures: list[RequestFailure] = []
        for load in self._loader.finished():
            self._num_loading -= 1
            if isinstance(load.result, AdapterWeights):
                self._metrics.loaded(load.adapter.name, load.seconds)
                loaded = LoadedAdapter(adapter=load.adapter, weights=load.result)
                self._residency.complete(load.adapter.digest, loaded)
            else:
                self._residency.cancel(load.adapter.digest)
                failures += self._fail_waiting(load.adapter, load.result)
            self._registry.release(load.adapter)
        return failures

    def _fail_waiting(self, adapter: Adapter, error: GraftError) -> list[RequestFailure]:
        waiting = self._scheduler.waiting_for(adapter.digest)
        self._drop_if_stale(adapter, error)
        return self._fail(dict.fromkeys(self._job_of_request[request.request_id].job_id for request in waiting), error)

    def _drop_if_stale(self, adapter: Adapter, error: GraftError) -> None:
        if isinstance(error, AdapterChanged | AdapterFilesNotFound):
            self._registry.drop_version(adapter)

    def _make_resident(self, adapter: Adapter) -> None:
        """Pin an adapter while no job runs, loading it first if need be.

        Raises:
            AdapterError: it cannot be loaded any more.
        """
        if self._residency.pin(adapter.digest):
            return
        if not self._residency.reserve(adapter.digest, adapter.num_bytes, keep=frozenset(), work={}):
            raise RuntimeError("jobs are running")
        try:
            weights = self._loader.read(adapter)
        except BaseException:
            self._residency.cancel(adapter.digest)
            raise
        self._residency.complete(adapter.digest, LoadedAdapter(adapter=adapter, weights=weights))
        self._residency.pin(adapter.digest)

    def _despite_losses(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        while True:
            try:
                return self._whole_sequence(token_ids, adapter)
            except CacheLost:
                self._recover()
            except AdapterUnavailable as unavailable:
                raise unavailable.error from unavailable

    def _recover(self) -> None:
        """Go on after a loss: what requests have generated so far is known here, and the rest can be computed again."""
        self._in_flight.clear()
        self._scheduler.drop_steps()
        if (lost := self._executor.recover()) is not None:
            self._scheduler.lose(lost)

    def _give_up(self, unavailable: AdapterUnavailable) -> list[RequestFailure]:
        """End the jobs whose adapter cannot be had."""
        users = [job for job in self._jobs.values() if job.adapter and job.adapter.digest == unavailable.digest]
        for adapter in {job.adapter for job in users if job.adapter}:
            self._drop_if_stale(adapter, unavailable.error)
        return self._fail([job.job_id for job in users], unavailable.error)

    def _whole_sequence(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        """Logits of every row, computed in chunks of one step each."""
        tables = self._blocks.empty_tables(1 if adapter is None else adapter.cache_factor)
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
                    block_tables=tuple([table.packed for table in tables]),
                    num_logits=len(chunk),
                )
                rows.append(self._executor.submit([sequence]).logits())
                self._blocks.drop_behind(tables, num_computed=sequence.stop)
        finally:
            self._blocks.release(tables)
        return ops.widened(torch.cat(rows))

    def _sample(self, plan: SchedulerOutput, logits: Tensor, passed_over: Set[str]) -> dict[str, SampledToken | None]:
        """A token for every sequence that caught up with itself in this step, without those that are passed over."""
        rows: list[int] = []
        requests: list[Request] = []
        stop = 0
        for sequence in plan.sequences:
            start, stop = stop, stop + sequence.num_logits
            if sequence.request_id not in self._job_of_request:
                continue  # aborted meanwhile
            request = self._scheduler.get(sequence.request_id)
            if request.wants_prompt_logits:
                self._record_prompt_logprobs(request, sequence.start, logits[start:stop])
            if request.gets_token_at(sequence.stop) and sequence.request_id not in passed_over:
                rows.append(stop - 1)
                requests.append(request)
        if not requests:
            return {}
        wanted = logits if len(rows) == len(logits) else logits[rows]
        with using(self._kernels):
            tokens = sample(wanted, requests)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}

    def _record_prompt_logprobs(self, request: Request, start: int, rows: Tensor) -> None:
        """Row i predicts the prompt's token at start + i + 1. The n answers share the result and a preempted request
        comes by again, so only what is not there yet is recorded."""
        job = self._job_of_request[request.request_id]
        prompt, recorded = job.prompt_token_ids, job.prompt_logprobs
        if not recorded:
            recorded.append(TokenLogprob(token_id=prompt[0], text=job.tokenizer.token_text(prompt[0]), logprob=None))
        num_recorded = len(recorded) - (start + 1 - request.num_virtual_tokens)
        if num_recorded < 0:
            return
        rows = rows[num_recorded:]
        token_ids = prompt[len(recorded) : len(recorded) + len(rows)]
        if token_ids:
            counts = [request.params.prompt_logprobs or 0] * len(token_ids)
            with using(self._kernels):
                rated = rate(rows[: len(token_ids)], token_ids, counts)
            for token_id, described in zip(token_ids, rated, strict=True):
                recorded.append(describe_logprobs(token_id, described, job.tokenizer))

    def _answer(self, job: Job, request: Request, token: SampledToken | None) -> CompletionOutput:
        """The delta of an answer that got a token and those that had to follow it, or that ended without one
        (max_tokens 0)."""
        text, logprobs = self._take(job, request, token)
        token_ids = [] if token is None else [token.token_id]
        while (forced := _forced_token(request)) is not None:
            self._scheduler.append(request, forced)
            more, _ = self._take(job, request, SampledToken(forced))
            text += more
            token_ids.append(forced)
        return delta(request, text, tuple(token_ids), logprobs)

    def _take(
        self, job: Job, request: Request, token: SampledToken | None
    ) -> tuple[str, tuple[TokenLogprob, ...] | None]:
        """What a token that was appended to a request, if there was one, adds to its answer."""
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
            job.timings.produce()
        if token is not None and token.logprobs is not None:
            logprobs = (describe_logprobs(token.token_id, token.logprobs, job.tokenizer),)
        return text, logprobs

    def _report(self, job: Job, deltas: Sequence[CompletionOutput]) -> RequestOutput:
        """What moved of a job, all its answers together: several may end in one step, and the last ends the job."""
        if job.finished:
            self._retire(job)
        return job.output(*deltas)

    def _retire(self, job: Job) -> None:
        del self._jobs[job.job_id]
        job.timings.end()
        self._metrics.ended(job)
        for request in job.requests:
            del self._job_of_request[request.request_id]
        if job.adapter is not None:
            self._registry.release(job.adapter)


def _forced_token(request: Request) -> int | None:
    """The token that must follow by a running request's grammar, so that no step is needed to choose it. Whoever wants
    log-probabilities needs the step."""
    if request.grammar is None or request.finish_reason is not None or request.params.logprobs is not None:
        return None
    return request.grammar.forced_token
