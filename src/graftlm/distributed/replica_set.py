"""Several whole engines behind one front end: each job goes to one of them, and to another if that one is lost.

Jobs, their names and holds, and what they have been told so far are known here; replicas know what they were sent. A
job that loses its replica goes on elsewhere from the tokens that its caller has: sampling is a function of seed and
position, so they are continued as if nothing had happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from torch import Tensor

from graftlm.adapters import Adapter, AdapterRegistry
from graftlm.config import EngineConfig
from graftlm.distributed.messages import AdapterRecipe
from graftlm.distributed.replica_drain import ReplicaDrain
from graftlm.distributed.replica_group import GroupEvent, Joined, Lost, Member, ReplicaGroup, ReplicaPool
from graftlm.distributed.replica_messages import ReplicaDelta, ReplicaFailure, ReplicaLoad, ReplicaRequest
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.replica_workers import describe_replicas
from graftlm.engine.executor import BetweenSteps, MovedStage, WorkerInfo
from graftlm.engine.job import Job, delta
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.outputs import RequestFailure, RequestOutput
from graftlm.engine.tenant import Tenant
from graftlm.errors import AdapterChanged, AdapterFilesNotFound, GraftError, InvalidRequest, StepFailed
from graftlm.routing.prefix_index import prefix_of
from graftlm.routing.worker_table import RoutedRequest

# A request that takes a replica along every time would do so for ever.
MAX_LOSSES = 3


@dataclass(kw_only=True, eq=False)
class _Flight:
    """A job, where it is, and how often it has lost its replica. member: None while there is no replica."""

    job: Job
    routed: RoutedRequest
    member: Member | None = None
    num_losses: int = 0


class ReplicaSet:
    """`JobRunner` over replicas.

    Args:
        config: of the whole. replica_config: of each replica. num_layers: that each has, or its workers together.
        wake: as for `ComputableModel.runner`.

    Raises:
        ConfigurationError, CheckpointError: a replica cannot be loaded.
        EngineClosed: one is lost while it loads.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        config: EngineConfig,
        replica_config: EngineConfig,
        *,
        num_layers: int,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
        residency: ReplicaResidency,
        wake: Callable[[], None] | None,
    ) -> None:
        self._config = config
        self._layers = None if replica_config.has_workers else (0, num_layers)
        self._registry = registry
        self._metrics = metrics
        self._residency = residency
        self._wake = wake
        self._flights: dict[str, _Flight] = {}
        self._inbox: SimpleQueue[GroupEvent] = SimpleQueue()
        self._group = ReplicaGroup(
            pool, config, replica_config, registry=registry, residency=residency, tell=self._hear
        )
        self._drain = ReplicaDrain(self._group, num_layers=num_layers, has_workers=replica_config.has_workers)
        # Of two at a time each might go where the other is to leave.
        self._draining = threading.Lock()
        # A job has ended, or has gone elsewhere.
        self._ended = threading.Condition()

    @property
    def has_work(self) -> bool:
        return bool(self._flights) or not self._inbox.empty()

    @property
    def waits_for_loads(self) -> bool:
        return self._inbox.empty()

    @property
    def num_running(self) -> int:
        return sum(load.num_running for load in self._loads())

    @property
    def num_waiting(self) -> int:
        """Those that have no replica now included."""
        homeless = [flight for flight in list(self._flights.values()) if flight.member is None]
        return sum(load.num_waiting for load in self._loads()) + sum(len(flight.job.requests) for flight in homeless)

    @property
    def num_free_blocks(self) -> int:
        return sum(load.num_free_blocks for load in self._loads())

    @property
    def num_blocks(self) -> int:
        """Of the replicas that there are; one block when there are none, for nothing is a part of none."""
        return sum(load.num_blocks for load in self._loads()) or 1

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        running = tuple(
            describe_replicas(
                (*self._group.members, *self._group.draining),
                layers=self._layers,
                names=[(name, adapter.digest) for name, adapter in self._registry.adapters.items()],
                held=self._residency.by_replica(),
            )
        )
        return (*running, *self._group.spares)

    @property
    def num_lost_workers(self) -> int:
        return self._group.num_lost

    @property
    def num_moves(self) -> int:
        return self._group.num_moves

    def drain(self, target: str, between_steps: BetweenSteps, *, finish_seconds: float) -> tuple[MovedStage, ...]:
        """Have other processes in the place of a replica, or of all that is on a node, and end those that drain.

        Requests that they have begun may finish there; what is left goes on elsewhere from the tokens it has.

        Args:
            target: a replica's id, that of one of its workers, or a node's. finish_seconds: for what they have begun.

        Raises:
            ObjectNotFound, DrainFailed
        """
        with self._draining, self._drain.replacing(target) as (left, moved):
            if left:
                between_steps(lambda: self._send_on(left, only_waiting=True))
                with self._ended:
                    self._ended.wait_for(lambda: not self._flights_of(left), finish_seconds)
                between_steps(lambda: self._send_on(left, only_waiting=False))
            return moved

    def add(self, job: Job) -> None:
        """Start a job. Its adapter goes back to the registry when it ends, however it ends."""
        flight = _Flight(job=job, routed=_routed(job, self._config.block_size))
        self._flights[job.job_id] = flight
        self._send(flight)

    def abort(self, job_id: str) -> RequestOutput | None:
        """Stop a job where it is. None when it is unknown or has finished."""
        flight = self._flights.get(job_id)
        if flight is None:
            return None
        if flight.member is not None:
            flight.member.handle.abort(job_id)
        running = [request for request in flight.job.requests if request.finish_reason is None]
        for request in running:
            request.finish_reason = "abort"
        self._retire(flight)
        return flight.job.output(*(delta(request) for request in running))

    def abort_users(self, adapter: Adapter) -> list[RequestOutput]:
        """Stop every job of an adapter, or of a sum it is part of."""
        users = [job_id for job_id, flight in self._flights.items() if flight.job.uses(adapter)]
        return [output for job_id in users if (output := self.abort(job_id)) is not None]

    def abort_all(self) -> list[str]:
        """Stop every job; their ids."""
        job_ids = list(self._flights)
        for job_id in job_ids:
            self.abort(job_id)
        return job_ids

    def step(self) -> list[RequestOutput | RequestFailure]:
        """What has come from the replicas. Waits for something if nobody would be woken by it."""
        outputs: list[RequestOutput | RequestFailure] = []
        if self._wake is None and self._flights:
            outputs += self._take(self._inbox.get())
        while not self._inbox.empty():
            outputs += self._take(self._inbox.get())
        return outputs

    def logits(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        raise InvalidRequest("replicas do not hand out logits", do="use an engine without replicas")

    def close(self) -> None:
        """End all replicas. May be called twice."""
        self._group.close()

    def _flights_of(self, members: Sequence[Member]) -> list[_Flight]:
        return [flight for flight in list(self._flights.values()) if flight.member in members]

    def _send_on(self, members: Sequence[Member], *, only_waiting: bool) -> None:
        """What these have goes to others. only_waiting: what has been in no step yet."""
        for flight in self._flights_of(members):
            if flight.job.timings.begun is None or not only_waiting:
                assert flight.member is not None
                flight.member.handle.abort(flight.job.job_id)
                self._send(flight)

    def _hear(self, event: GroupEvent) -> None:
        """In a replica's thread."""
        self._inbox.put(event)
        if self._wake is not None:
            self._wake()

    def _loads(self) -> list[ReplicaLoad]:
        return [member.status.load for member in self._group.members]

    def _take(self, item: GroupEvent) -> list[RequestOutput | RequestFailure]:
        if isinstance(item, Joined):
            for flight in [flight for flight in self._flights.values() if flight.member is None]:
                self._send(flight)
            return []
        if isinstance(item, Lost):
            lost = [flight for flight in self._flights.values() if flight.member is item.member]
            return [failure for flight in lost if (failure := self._move(flight)) is not None]
        known = self._flights.get(item.event.job_id)
        # What was still under way when the job was given up, or given to another.
        if known is None or known.member is not item.member:
            return []
        if isinstance(item.event, ReplicaFailure):
            return self._failed(known, item.event)
        return [self._moved(known, item.event)]

    def _send(self, flight: _Flight) -> None:
        """To the replica that the policy chooses; if there is none, as soon as there is one."""
        with self._ended:
            # Whoever waits for one that drains may have waited for this.
            self._ended.notify_all()
        job = flight.job
        flight.member = self._group.choose(flight.routed)
        if flight.member is None:
            return
        first = job.requests[0]
        flight.member.handle.submit(
            ReplicaRequest(
                job_id=job.job_id,
                prompt_token_ids=job.prompt_token_ids,
                params=replace(first.params, seed=first.seed, max_tokens=first.max_tokens),
                adapter=None if job.adapter is None else AdapterRecipe.of(job.adapter),
                tenant=Tenant(name=first.tenant, cache_salt=first.cache_salt),
                resume={
                    request.index: tuple(request.output_token_ids)
                    for request in job.requests
                    if request.finish_reason is None
                },
            )
        )

    def _move(self, flight: _Flight) -> RequestFailure | None:
        """A job has lost its replica."""
        flight.num_losses += 1
        if flight.num_losses < MAX_LOSSES:
            self._send(flight)
            return None
        error = StepFailed("every replica that computed this request was lost", do="send it again")
        return self._fail(flight, error)

    def _failed(self, flight: _Flight, failure: ReplicaFailure) -> list[RequestOutput | RequestFailure]:
        if failure.is_fatal:
            # Its thread hears of its death, and the job goes on elsewhere.
            assert flight.member is not None
            flight.member.handle.kill()
            return []
        if isinstance(failure.error, AdapterChanged | AdapterFilesNotFound) and flight.job.adapter is not None:
            self._registry.drop_version(flight.job.adapter)
        return [self._fail(flight, failure.error)]

    def _fail(self, flight: _Flight, error: GraftError) -> RequestFailure:
        self.abort(flight.job.job_id)
        return RequestFailure(request_id=flight.job.job_id, error=error)

    def _moved(self, flight: _Flight, moved: ReplicaDelta) -> RequestOutput:
        job = flight.job
        if job.timings.begun is None:
            job.timings.begun = max(job.timings.arrived, time.perf_counter() - moved.computing_seconds)
            job.requests[0].num_cached_tokens = moved.num_cached_tokens
            self._metrics.scheduled(job)
        if moved.prompt_logprobs is not None and not job.prompt_was_reported:
            job.prompt_logprobs.extend(moved.prompt_logprobs)
        for answer in moved.answers:
            request = job.requests[answer.index]
            request.output_token_ids.extend(answer.token_ids)
            request.finish_reason, request.stop_reason = answer.finish_reason, answer.stop_reason
            if answer.token_ids:
                job.timings.produce()
        self._metrics.produced([(job, answer.index) for answer in moved.answers for _ in answer.token_ids])
        if job.finished:
            self._retire(flight)
        return job.output(*moved.answers)

    def _retire(self, flight: _Flight) -> None:
        job = flight.job
        del self._flights[job.job_id]
        if flight.member is not None:
            self._group.ended(flight.member)
        with self._ended:
            self._ended.notify_all()
        job.timings.end()
        self._metrics.ended(job)
        if job.adapter is not None:
            self._registry.release(job.adapter)


def _routed(job: Job, block_size: int) -> RoutedRequest:
    adapter, first = job.adapter, job.requests[0]
    digest = None if adapter is None else adapter.digest
    return RoutedRequest(
        adapter=digest,
        adapter_bytes=0 if adapter is None else adapter.num_bytes,
        prompt_tokens=len(job.prompt_token_ids),
        output_tokens=sum(request.max_tokens for request in job.requests),
        prefix=prefix_of(job.prompt_token_ids, scope=f"{digest} {first.cache_salt}", block_size=block_size),
        block_size=block_size,
    )
