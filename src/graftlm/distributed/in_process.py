"""Workers that are threads of this process and go wrong on request: to test recovery without processes or clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from graftlm.distributed.messages import (
    AdapterRecipe,
    RankPlace,
    StageDescription,
    StagePlan,
    StageReply,
    StageStep,
    WorkerMeasure,
)
from graftlm.distributed.probe import Probe
from graftlm.distributed.stage import Stage
from graftlm.distributed.thread_collective import ThreadCollective, ThreadGroup
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.executor import WorkerInfo
from graftlm.errors import GraftError
from graftlm.layers.collective import CollectiveFailed
from graftlm.models.layer_span import LayerSpan

Answer = TypeVar("Answer")
# die: the worker is gone, its step not computed. freeze: it does nothing more, and once it was given up it goes on with
# all it had been asked. drop: the step is computed and the answer lost. delay: the step is computed, with all that
# follow, after the worker was given up. duplicate: the step arrives twice. break: what nobody foresaw is raised.
FaultKind = Literal["die", "freeze", "drop", "delay", "duplicate", "break"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a step. stage: its first layer. at: which of the steps for this stage, from 1, over all its
    workers."""

    kind: FaultKind
    stage: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node that is made up. probe_seconds: what its workers say that a probe took. layer_seconds: and a step, for
    each layer; None says how it was. free_bytes: what they say of its memory."""

    node: str
    probe_seconds: float = 1.0
    layer_seconds: float | None = None
    free_bytes: int = 1 << 40


class InProcessPool:
    """`WorkerPool` whose workers go wrong as told.

    num_taken: workers so far. retired: ids of those that have ended by being asked to.
    machines: where they are; may be added to, as nodes join.
    """

    def __init__(self, faults: Sequence[Fault] = (), machines: Sequence[Machine] = (Machine(node="here"),)) -> None:
        self.num_taken = 0
        self.retired: list[str] = []
        self.pending_faults = list(faults)
        self.machines = list(machines)
        self._vacated: set[str] = set()
        self._num_steps: dict[int, int] = {}
        self._groups: dict[str, ThreadGroup] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(machine.node for machine in self.machines if machine.node not in self._vacated)

    def vacate(self, node: str) -> None:
        self._vacated.add(node)

    def readmit(self, node: str) -> None:
        self._vacated.discard(node)

    def take(self, busy: Mapping[str, int]) -> InProcessWorker:
        """On the least busy machine; where nothing is said, on one after the other."""
        usable = [machine for machine in self.machines if machine.node not in self._vacated]
        first = self.num_taken % len(usable)
        machine = min((*usable[first:], *usable[:first]), key=lambda machine: busy.get(machine.node, 0))
        self.num_taken += 1
        return InProcessWorker(f"worker-{self.num_taken}", self, machine)

    def rendezvous(self, size: int) -> str:
        name = f"group-{len(self._groups) + 1}"
        self._groups[name] = ThreadGroup(size)
        return name

    def join(self, place: RankPlace) -> ThreadCollective:
        return self._groups[place.rendezvous].join(place.rank)

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        return ()

    def keep_spares(self, nodes: Iterable[str]) -> None:
        pass

    def close(self) -> None:
        pass

    def next_fault(self, span: LayerSpan) -> FaultKind | None:
        """What befalls the step that a stage is about to be sent."""
        count = self._num_steps[span.start] = self._num_steps.get(span.start, 0) + 1
        for fault in self.pending_faults:
            if (fault.stage, fault.at) == (span.start, count):
                self.pending_faults.remove(fault)
                return fault.kind
        return None


class InProcessWorker:
    """`Worker` that serves its calls in a thread of its own."""

    def __init__(self, worker_id: str, pool: InProcessPool, machine: Machine) -> None:
        self.id = worker_id
        self._pool = pool
        self._machine = machine
        self._stage: Stage | None = None
        self._plan: StagePlan | None = None
        self._collective: ThreadCollective | None = None
        # What made it lost, if it is.
        self._fault: FaultKind | None = None
        self._left_undone: list[Callable[[], object]] = []
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(max_workers=1, thread_name_prefix=worker_id)

    def measure(self, probe: Probe) -> InProcessCall[WorkerMeasure]:
        machine = self._machine
        measure = WorkerMeasure(node=machine.node, seconds=machine.probe_seconds, free_bytes=machine.free_bytes)
        return self._ask(lambda: measure)

    def load(self, plan: StagePlan) -> InProcessCall[StageDescription]:
        self._plan = plan
        if plan.place is not None and self._collective is None:
            self._collective = self._pool.join(plan.place)
        return self._ask(partial(self._load, plan))

    def begin(self, epoch: int) -> InProcessCall[None]:
        return self._ask(lambda: self._loaded.begin(epoch))

    def ensure_adapter(self, recipe: AdapterRecipe) -> InProcessCall[bool]:
        return self._ask(lambda: self._loaded.ensure_adapter(recipe))

    def forget_adapters(self, digests: Sequence[str]) -> InProcessCall[None]:
        return self._ask(lambda: self._loaded.forget_adapters(digests))

    def step(self, step: StageStep, before: Any) -> InProcessCall[StageReply]:
        assert self._plan is not None
        return self._ask(partial(self._step, step, before, self._pool.next_fault(self._plan.span)))

    def retire(self, patience_seconds: float) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(self._end)
            thread.shutdown(wait=True)
            self._pool.retired.append(self.id)

    def kill(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._collective is not None:
            self._collective.close()
        thread.submit(self._end)
        thread.shutdown(wait=False)

    def _ask(self, serve: Callable[[], Answer]) -> InProcessCall[Answer]:
        if self._thread is None:
            raise WorkerLost(f"{self.id} is gone")
        return InProcessCall(self.id, self._thread.submit(self._serve, serve))

    def _serve(self, serve: Callable[[], Answer]) -> Answer:
        if self._fault == "freeze":
            self._left_undone.append(serve)
        elif self._fault == "delay":
            serve()
        if self._fault is not None:
            raise WorkerLost(f"{self.id}: {self._fault}")
        return serve()

    def _load(self, plan: StagePlan) -> StageDescription:
        self._stage = Stage(plan, self._collective)
        return replace(self._stage.describe(), node=self._machine.node, free_bytes=self._machine.free_bytes)

    def _step(self, step: StageStep, before: Future[StageReply] | None, fault: FaultKind | None) -> StageReply:
        if fault is None or fault == "duplicate":
            reply = self._compute(step, before)
            return reply if fault is None else self._compute(step, before)
        if fault == "break":
            raise MemoryError("as told")
        self._fault = fault
        if fault == "freeze":
            self._left_undone.append(partial(self._compute, step, before))
        elif fault != "die":
            self._compute(step, before)
        raise WorkerLost(f"{self.id}: {fault}")

    def _compute(self, step: StageStep, before: Future[StageReply] | None) -> StageReply:
        reply = self._loaded.step(step, None if before is None else before.result())
        if self._machine.layer_seconds is None:
            return reply
        assert self._plan is not None
        num_layers = self._plan.span.stop - self._plan.span.start
        own = replace(reply.reports[-1], compute_seconds=num_layers * self._machine.layer_seconds)
        return replace(reply, reports=(*reply.reports[:-1], own))

    def _end(self) -> None:
        for serve in self._left_undone:
            # Nobody computes with a rank of a group that was given up, nor for a stage that others have.
            with contextlib.suppress(CollectiveFailed, WorkerLost, GraftError):
                serve()
        self._left_undone.clear()
        self._stage = None

    @property
    def _loaded(self) -> Stage:
        if self._stage is None:
            raise WorkerLost(f"{self.id} has no stage")
        return self._stage


class InProcessCall(Generic[Answer]):
    """`Call` of a thread."""

    def __init__(self, worker_id: str, future: Future[Answer]) -> None:
        self._worker_id = worker_id
        self._future = future

    @property
    def promise(self) -> Future[Answer]:
        return self._future

    def wait(self, patience_seconds: float) -> None:
        wait_for([self._future])

    def result(self, patience_seconds: float) -> Answer:
        try:
            return self._future.result()
        except CollectiveFailed as failed:
            raise WorkerLost(f"{self._worker_id}: {failed}") from failed
