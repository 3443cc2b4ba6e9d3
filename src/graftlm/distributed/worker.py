"""What a pipeline asks of the processes that hold its stages. Ray's actors are such."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from graftlm.distributed.messages import (
    AdapterRecipe,
    StageDescription,
    StagePlan,
    StageReply,
    StageStep,
    WorkerMeasure,
)
from graftlm.distributed.probe import Probe
from graftlm.engine.executor import WorkerInfo

Answer_co = TypeVar("Answer_co", covariant=True)


class WorkerLost(Exception):
    """A worker died, or gives no sign of life, which is treated alike: it is never spoken to again."""


class Call(Protocol[Answer_co]):
    """Something a worker was asked, and does meanwhile. One whose answer nobody needs may be let go of."""

    @property
    def promise(self) -> Any:
        """Stands for the answer, there or not, where another worker of the same pool is given it."""
        ...

    def wait(self, patience_seconds: float) -> None:
        """Until it is answered, or has failed.

        Raises:
            WorkerLost: the worker has given no sign of life for so long.
            Exception: as `result`, where that is known already.
        """
        ...

    def result(self, patience_seconds: float) -> Answer_co:
        """The answer.

        Raises:
            WorkerLost: as `wait`, or it died.
            Exception: what the stage raised.
        """
        ...


class Worker(Protocol):
    """A process that can take a stage; calls are served in the order in which they are made."""

    @property
    def id(self) -> str: ...

    def measure(self, probe: Probe) -> Call[WorkerMeasure]:
        """How fast it is, and what memory there is. Asked before it loads anything."""
        ...

    def load(self, plan: StagePlan) -> Call[StageDescription]:
        """Make a stage, which the other calls go to. It takes the place of the one that was there."""
        ...

    def begin(self, epoch: int) -> Call[None]: ...

    def ensure_adapter(self, recipe: AdapterRecipe) -> Call[bool]: ...

    def forget_adapters(self, digests: Sequence[str]) -> Call[None]: ...

    def step(self, step: StageStep, before: Any) -> Call[StageReply]:
        """Compute a step as soon as the stage before has.

        Args:
            before: the promise of that one's reply; None for the first.
        """
        ...

    def retire(self, patience_seconds: float) -> None:
        """Have the process end as soon as it has done what it was asked; it is killed if that takes longer."""
        ...

    def kill(self) -> None:
        """End the process, however it is. May be called twice."""
        ...


class WorkerPool(Protocol):
    """Where workers come from."""

    def rendezvous(self, size: int) -> str:
        """A new place where that many workers can meet, for `RankPlace`."""
        ...

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where it could have workers."""
        ...

    def vacate(self, node: str) -> None:
        """Have no spares on a node, and start nothing there from now on."""
        ...

    def readmit(self, node: str) -> None:
        """Undo `vacate`."""
        ...

    def take(self, busy: Mapping[str, int]) -> Worker:
        """A worker that has loaded nothing, as soon as can be.

        Args:
            busy: node -> stages there; of several spares the one with the fewest beside it is taken.

        Raises:
            WorkerLost: none can be had.
        """
        ...

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        """Workers that nobody has taken yet. May be read from any thread."""
        ...

    def keep_spares(self, nodes: Iterable[str]) -> None:
        """Have a spare on each of these nodes, soon; as many as it is named times."""
        ...

    def close(self) -> None:
        """End all of them. May be called twice."""
        ...
