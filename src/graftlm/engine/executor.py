"""Running a scheduled step on the model: what an executor is, and the one that computes in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from graftlm.adapters import Adapter
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.engine.span_runner import SpanRunner
from graftlm.errors import AdapterError

WorkerState = Literal["running", "spare", "lost"]


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A process that computes some of the layers.

    node: where it is. layers: (start, stop); None for a spare. adapters: names of those it holds weights of.
    """

    id: str
    node: str
    pid: int
    layers: tuple[int, int] | None
    adapters: tuple[str, ...]
    state: WorkerState


class CacheLost(Exception):
    """Keys and values of earlier steps are gone, and the step was not computed. After `recover` every running request
    can be computed anew."""


class AdapterUnavailable(Exception):
    """A step was not computed because an adapter's weights cannot be had; nothing else is lost."""

    def __init__(self, digest: str, error: AdapterError) -> None:
        super().__init__(str(error))
        self.digest = digest
        self.error = error


class Executor(Protocol):
    """Holds the model, the KV cache and the adapters that running requests use. Used by one thread at a time."""

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes it computes in, if they are others. May be read from any thread."""
        ...

    def hold_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter for one more user. Equal digests are equal weights, under whatever name."""
        ...

    def release_adapter(self, adapter: Adapter) -> None:
        """One user fewer."""
        ...

    def execute(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        """Compute the sequences' tokens; logits of the rows that want them, [N, V] float32, in the given order.

        Raises:
            CacheLost, AdapterUnavailable
        """
        ...

    def recover(self) -> None:
        """Be ready again after `CacheLost`.

        Raises:
            EngineClosed: that is not possible now.
        """
        ...

    def close(self) -> None:
        """Let go of everything outside this process. May be called twice."""
        ...


class LocalExecutor:
    """Executes in this process."""

    workers: tuple[WorkerInfo, ...] = ()

    def __init__(self, runner: SpanRunner) -> None:
        self._runner = runner
        self._adapters: dict[str, Adapter] = {}
        self._users: Counter[str] = Counter()

    def hold_adapter(self, adapter: Adapter) -> None:
        self._adapters.setdefault(adapter.digest, adapter)
        self._users[adapter.digest] += 1

    def release_adapter(self, adapter: Adapter) -> None:
        self._users[adapter.digest] -= 1
        if self._users[adapter.digest] == 0:
            del self._users[adapter.digest], self._adapters[adapter.digest]

    def execute(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        return self._runner.run(sequences, self._adapters)

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass
