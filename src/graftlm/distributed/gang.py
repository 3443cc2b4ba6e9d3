"""Workers that share one stage out by tensors, as one worker: they live and die together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Generic, TypeVar

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
from graftlm.distributed.worker import Call, Worker, WorkerLost, WorkerPool
from graftlm.engine.executor import WorkerInfo
from graftlm.errors import AdapterError

Answer = TypeVar("Answer")


class Gang:
    """`Worker` of several, one for each rank. What one is asked all are asked; the first one's answer counts.

    Without one of them the others cannot compute: whatever goes wrong with one ends all.
    """

    def __init__(self, workers: Sequence[Worker], rendezvous: str) -> None:
        self.id = workers[0].id
        self._workers = tuple(workers)
        self._rendezvous = rendezvous
        # What goes wrong with any of them first is what counts.
        self._threads = ThreadPoolExecutor(max_workers=len(workers), thread_name_prefix="graft-rank")

    def measure(self, probe: Probe) -> _GangCall[WorkerMeasure]:
        """As slow as the slowest of them, with the least memory."""
        return _GangCall(
            self,
            [worker.measure(probe) for worker in self._workers],
            lambda measures: replace(
                measures[0],
                seconds=max(measure.seconds for measure in measures),
                free_bytes=min(measure.free_bytes for measure in measures),
            ),
        )

    def load(self, plan: StagePlan) -> _GangCall[StageDescription]:
        size = len(self._workers)
        plans = [
            replace(plan, place=RankPlace(rank=rank, size=size, rendezvous=self._rendezvous)) for rank in range(size)
        ]
        calls = [worker.load(own) for worker, own in zip(self._workers, plans, strict=True)]
        return _GangCall(self, calls, lambda places: replace(places[0], others=tuple(places[1:])))

    def begin(self, epoch: int) -> _GangCall[None]:
        return _GangCall(self, [worker.begin(epoch) for worker in self._workers], _first)

    def ensure_adapter(self, recipe: AdapterRecipe) -> Call[bool]:
        return _AdapterCall(self, recipe.digest, [worker.ensure_adapter(recipe) for worker in self._workers])

    def forget_adapters(self, digests: Sequence[str]) -> _GangCall[None]:
        return _GangCall(self, [worker.forget_adapters(digests) for worker in self._workers], _first)

    def step(self, step: StageStep, before: Any) -> _GangCall[StageReply]:
        return _GangCall(self, [worker.step(step, before) for worker in self._workers], _first)

    def retire(self, patience_seconds: float) -> None:
        for worker in self._workers:
            worker.retire(patience_seconds)
        self._threads.shutdown(wait=False)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=False)

    def wait(self, calls: Sequence[Call[Answer]], patience_seconds: float) -> list[Answer]:
        """All answers, in the order of ranks.

        Raises:
            WorkerLost: of the rank that failed first; the others are ended.
            GraftError: what the first rank raised.
        """
        waiting: list[Future[Answer]] = [self._threads.submit(call.result, patience_seconds) for call in calls]
        lost: WorkerLost | None = None
        for done in as_completed(waiting):
            error = done.exception()
            if isinstance(error, WorkerLost) and lost is None:
                lost = error
                for worker in self._workers:
                    worker.kill()
        if lost is not None:
            raise lost
        return [answer.result() for answer in waiting]


class GangPool:
    """`WorkerPool` that gives so many of another pool's workers at a time.

    Args:
        size: ranks of each gang.
    """

    def __init__(self, pool: WorkerPool, size: int) -> None:
        self._pool = pool
        self._size = size

    def rendezvous(self, size: int) -> str:
        return self._pool.rendezvous(size)

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._pool.nodes

    def vacate(self, node: str) -> None:
        self._pool.vacate(node)

    def readmit(self, node: str) -> None:
        self._pool.readmit(node)

    def take(self, busy: Mapping[str, int]) -> Gang:
        rendezvous = self._pool.rendezvous(self._size)
        return Gang([self._pool.take(busy) for _ in range(self._size)], rendezvous)

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        return self._pool.spares

    def keep_spares(self, nodes: Iterable[str]) -> None:
        """Enough for a gang on each."""
        self._pool.keep_spares([node for node in nodes for _ in range(self._size)])

    def close(self) -> None:
        self._pool.close()


class _GangCall(Generic[Answer]):
    def __init__(self, gang: Gang, calls: Sequence[Call[Answer]], combine: Callable[[list[Answer]], Answer]) -> None:
        self._gang = gang
        self._calls = calls
        self._combine = combine
        self._answers: list[Answer] | None = None

    @property
    def promise(self) -> Any:
        return self._calls[0].promise

    def wait(self, patience_seconds: float) -> None:
        if self._answers is None:
            self._answers = self._gang.wait(self._calls, patience_seconds)

    def result(self, patience_seconds: float) -> Answer:
        self.wait(patience_seconds)
        assert self._answers is not None
        return self._combine(self._answers)


class _AdapterCall(_GangCall[bool]):
    """Where one rank refuses an adapter none keeps it."""

    def __init__(self, gang: Gang, digest: str, calls: Sequence[Call[bool]]) -> None:
        super().__init__(gang, calls, any)
        self._digest = digest

    def wait(self, patience_seconds: float) -> None:
        try:
            super().wait(patience_seconds)
        except AdapterError:
            self._gang.forget_adapters([self._digest])
            raise


def _first(answers: list[Answer]) -> Answer:
    return answers[0]
