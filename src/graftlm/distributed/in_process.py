"""Workers that are objects in this process and go wrong on request: to test recovery without processes or clocks."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from graftlm.distributed.messages import AdapterRecipe, RankPlace, StageDescription, StagePlan, StageReply, StageStep
from graftlm.distributed.stage import Stage
from graftlm.distributed.thread_collective import ThreadCollective, ThreadGroup
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.executor import WorkerInfo
from graftlm.layers.collective import CollectiveFailed
from graftlm.models.layer_span import LayerSpan

Answer = TypeVar("Answer")
# die: the worker is gone, its step not computed. freeze: it does not answer, and once it was given up it goes on with
# what it had been asked. drop: the step is computed and the answer lost. delay: the answer comes after the worker was
# given up. duplicate: step and answer arrive twice.
FaultKind = Literal["die", "freeze", "drop", "delay", "duplicate"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a step. stage: its first layer. at: which of the steps for this stage, from 1, over all its
    workers."""

    kind: FaultKind
    stage: int
    at: int


class InProcessPool:
    """`WorkerPool` whose workers go wrong as told. num_taken: workers so far."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.num_taken = 0
        self.pending_faults = list(faults)
        self._num_steps: dict[int, int] = {}
        self._strays: dict[tuple[int, int], deque[StageReply]] = {}
        self._groups: dict[str, ThreadGroup] = {}

    def take(self) -> InProcessWorker:
        self.num_taken += 1
        return InProcessWorker(f"worker-{self.num_taken}", self)

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

    def strays(self, plan: StagePlan) -> deque[StageReply]:
        """Answers that will arrive at whoever waits for the next one of this stage, and this rank of it."""
        rank = 0 if plan.place is None else plan.place.rank
        return self._strays.setdefault((plan.span.start, rank), deque())


class InProcessWorker:
    """`Worker` that computes when it is asked for the answer."""

    def __init__(self, worker_id: str, pool: InProcessPool) -> None:
        self.id = worker_id
        self._pool = pool
        self._stage: Stage | None = None
        self._plan: StagePlan | None = None
        self._collective: ThreadCollective | None = None
        self._is_lost = False
        self._when_killed: list[Callable[[], None]] = []

    def load(self, plan: StagePlan) -> _Call[StageDescription]:
        self._plan = plan
        self._collective = None if plan.place is None else self._pool.join(plan.place)
        self._stage = Stage(plan, self._collective)
        return self._call(self._stage.describe)

    def begin(self, epoch: int) -> _Call[None]:
        return self._call(lambda: self._loaded.begin(epoch))

    def ensure_adapter(self, recipe: AdapterRecipe) -> _Call[bool]:
        return self._call(lambda: self._loaded.ensure_adapter(recipe))

    def forget_adapters(self, digests: Sequence[str]) -> _Call[None]:
        return self._call(lambda: self._loaded.forget_adapters(digests))

    def step(self, step: StageStep) -> _Call[StageReply]:
        assert self._plan is not None
        stage, strays = self._loaded, self._pool.strays(self._plan)
        kind = self._pool.next_fault(self._plan.span)

        def strayed() -> None:
            # Nobody computes with a rank of a group that was given up.
            with contextlib.suppress(CollectiveFailed):
                strays.append(stage.step(step))

        def compute() -> StageReply:
            if kind == "freeze":
                self._when_killed.append(strayed)
            if kind in ("delay", "duplicate"):
                strayed()
            if kind == "drop":
                stage.step(step)
            if kind not in (None, "duplicate"):
                self._is_lost = True
                raise WorkerLost(f"{self.id}: {kind}")
            return stage.step(step)

        return self._call(compute, strays)

    def kill(self) -> None:
        self._is_lost = True
        if self._collective is not None:
            self._collective.close()
        while self._when_killed:
            self._when_killed.pop()()
        self._stage = None

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    @property
    def _loaded(self) -> Stage:
        if self._stage is None:
            raise WorkerLost(f"{self.id} has no stage")
        return self._stage

    def _call(self, answer: Callable[[], Answer], strays: deque[Answer] | None = None) -> _Call[Answer]:
        return _Call(self, answer, deque() if strays is None else strays)


class _Call(Generic[Answer]):
    def __init__(self, worker: InProcessWorker, answer: Callable[[], Answer], strays: deque[Answer]) -> None:
        self._worker = worker
        self._answer = answer
        self._strays = strays

    def result(self, timeout_seconds: float) -> Answer:
        if self._worker.is_lost:
            raise WorkerLost(f"{self._worker.id} is gone")
        try:
            return self._strays.popleft() if self._strays else self._answer()
        except CollectiveFailed as failed:
            raise WorkerLost(f"{self._worker.id}: {failed}") from failed
