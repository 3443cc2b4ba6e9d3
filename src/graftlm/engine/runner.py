"""What runs jobs for a front end: an `EngineCore` in this process, or whole engines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from graftlm.adapters import Adapter, AdapterRegistry, LoadedAdapter
from graftlm.config import EngineConfig
from graftlm.engine.adapter_loader import ReadWeights
from graftlm.engine.cache_plan import CachePlan
from graftlm.engine.executor import BetweenSteps, MovedStage, WorkerInfo
from graftlm.engine.job import Job
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.outputs import RequestFailure, RequestOutput
from graftlm.engine.residency import Residency
from graftlm.models.base_weights import BaseWeights
from graftlm.models.decoder import Decoder


class JobRunner(Protocol):
    """Takes jobs and reports on them step by step. The numbers may be read from any thread; the rest is for one."""

    @property
    def has_work(self) -> bool: ...

    @property
    def waits_for_loads(self) -> bool:
        """Whether there is nothing to do before something has happened elsewhere, which wakes the front end."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def add(self, job: Job) -> None: ...

    def abort(self, job_id: str) -> RequestOutput | None: ...

    def abort_users(self, adapter: Adapter) -> list[RequestOutput]: ...

    def abort_all(self) -> list[str]: ...

    def step(self) -> list[RequestOutput | RequestFailure]: ...

    def logits(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor: ...

    def close(self) -> None: ...


class ComputableModel(Protocol):
    """A model that is ready, wherever it is, as an engine needs it. Fields as in `ServedModel`."""

    @property
    def has_all_layers(self) -> bool: ...

    @property
    def base(self) -> BaseWeights: ...

    @property
    def plan(self) -> CachePlan: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def decoder(self) -> Decoder | None: ...

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes it computes in, if they are others. May be read from any thread."""
        ...

    @property
    def num_lost_workers(self) -> int: ...

    @property
    def num_moves(self) -> int: ...

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        """As `Executor.drain`."""
        ...

    def runner(
        self,
        config: EngineConfig,
        *,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
        residency: Residency[LoadedAdapter],
        read_weights: ReadWeights,
        wake: Callable[[], None] | None,
    ) -> JobRunner:
        """What runs jobs on it.

        Args:
            read_weights: of one adapter. wake: lets the front end look for work, from any thread; None if it does
                nothing else than to wait in `step`.
        """
        ...

    def close(self) -> None:
        """Let go of everything outside this process. May be called twice."""
        ...
