"""Running a scheduled step on the model: what an executor is, and the one that computes in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from graftlm.adapters import LoadedAdapter
from graftlm.engine.batch_builder import by_layers
from graftlm.engine.logits import in_order
from graftlm.engine.residency import Residency
from graftlm.engine.scheduler import Replay, ScheduledSequence
from graftlm.engine.span_runner import SpanRunner
from graftlm.engine.stage_range import StageRange
from graftlm.errors import AdapterError, ObjectNotFound

WorkerState = Literal["running", "spare", "draining"]


@dataclass(frozen=True, kw_only=True)
class WorkerWork:
    """What a stage has done since it is on its workers.

    num_steps: answered. num_tokens: of a stage, computed in them. num_replayed_tokens: of these, that were computed
    again because the worker before it was lost. compute_seconds: of the steps. idle_seconds: that it waited for steps
    which were on their way.
    hop_bytes: sent and received with them. adapter_bytes: held now.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_replayed_tokens: int = 0
    compute_seconds: float = 0.0
    idle_seconds: float = 0.0
    hop_bytes: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """How full a replica is. num_running, num_waiting: answers. kv_cache_usage: from 0 to 1."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A process that computes some of the layers, or all of them, or has them computed: a replica.

    node: where it is. layers: (start, stop); None for a spare, and for a replica with workers of its own.
    rank: where several share these layers out by tensors. adapters: names of those it holds weights of.
    work: of the stage's first rank; None for the others and for spares. load: of a replica; None for all others.
    replica: the id of the one that it works for, or is.
    """

    id: str
    node: str
    pid: int
    layers: tuple[int, int] | None
    adapters: tuple[str, ...]
    state: WorkerState
    rank: int | None = None
    work: WorkerWork | None = None
    load: WorkerLoad | None = None
    replica: str | None = None


@dataclass(frozen=True, kw_only=True)
class MovedStage:
    """Layers [start, stop) that went from one worker to another. node, pid: where they are now.

    A replica keeps its id.
    """

    layers: tuple[int, int]
    worker: str
    to: str
    node: str
    pid: int


# Runs something while no step is being submitted or ended, and returns once that is done.
BetweenSteps = Callable[[Callable[[], None]], None]


class CacheLost(Exception):
    """Neither this step nor one after it was computed, and keys and values of earlier ones may be gone: `recover` says
    where."""


class AdapterUnavailable(Exception):
    """A step was not computed because an adapter's weights cannot be had; nothing else is lost."""

    def __init__(self, digest: str, error: AdapterError) -> None:
        super().__init__(str(error))
        self.digest = digest
        self.error = error


class StepInFlight(Protocol):
    """A step that was submitted. One that nobody needs any more may be let go of."""

    def logits(self) -> Tensor:
        """Those of the rows that want them, [N, V] in the model's dtype, in the order of the sequences. Asked once, and
        of earlier steps first.

        Raises:
            CacheLost
        """
        ...


class Executor(Protocol):
    """Holds the model and the KV cache. Used by one thread at a time."""

    @property
    def depth(self) -> int:
        """How many steps have to be in flight for all of it to be busy."""
        ...

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes it computes in, if they are others. May be read from any thread."""
        ...

    @property
    def num_lost_workers(self) -> int:
        """Workers that died or did not answer, so far. May be read from any thread."""
        ...

    @property
    def num_moves(self) -> int:
        """Times that a worker's layers went to another, or became others, though none was lost, so far. May be read
        from any thread."""
        ...

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        """Have a worker's layers, or all of a node's, in other processes, and end those that had them. Called in a
        thread of its own; steps go on until the layers have been read, and again after that: the next one raises
        `CacheLost`, and requests go on as after a loss.

        Args:
            target: a worker's id, a node's, or how a node's begins.

        Raises:
            ObjectNotFound: nothing is called so.
            DrainFailed, CheckpointError: nothing has moved then.
        """
        ...

    def submit(self, sequences: Sequence[ScheduledSequence], replays: Sequence[Replay] = ()) -> StepInFlight:
        """Begin to compute the sequences' tokens, whose adapters are pinned until this returns. Steps are computed in
        the order in which they are submitted, each as if the others before it had been computed already.

        Args:
            replays: of stages that `recover` has named, computed in the same step.

        Raises:
            CacheLost, AdapterUnavailable
        """
        ...

    def recover(self) -> StageRange | None:
        """Be ready again after `CacheLost`.

        Returns: the stages that have lost what they had in the cache, which `submit` can replay; all of them if nobody
            can do that for some alone. None: every stage has what it had.

        Raises:
            EngineClosed: that is not possible now.
        """
        ...

    def close(self) -> None:
        """Let go of everything outside this process. May be called twice."""
        ...


class ComputedStep:
    """`StepInFlight` that has been computed."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logits(self) -> Tensor:
        return self._logits


class LocalExecutor:
    """Executes in this process.

    Args:
        residency: where the adapters are.
    """

    depth = 1
    workers: tuple[WorkerInfo, ...] = ()
    num_lost_workers = 0
    num_moves = 0

    def __init__(self, runner: SpanRunner, residency: Residency[LoadedAdapter]) -> None:
        self._runner = runner
        self._residency = residency

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        raise ObjectNotFound("there is no such worker: the model is in this process", got=target)

    def submit(self, sequences: Sequence[ScheduledSequence], replays: Sequence[Replay] = ()) -> ComputedStep:
        if replays:
            raise ValueError("there are no stages here that could have lost anything")
        return ComputedStep(self._compute(sequences))

    def recover(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _compute(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        digests = {sequence.adapter_digest for sequence in sequences}
        adapters = {digest: self._residency.weights(digest).weights for digest in digests if digest is not None}
        groups = by_layers(sequences, adapters)
        if len(groups) == 1:
            return self._runner.run(sequences, adapters)
        logits = [self._runner.run([sequences[index] for index in group], adapters) for group in groups.values()]
        return in_order(logits, list(groups.values()), [sequence.num_logits for sequence in sequences])
