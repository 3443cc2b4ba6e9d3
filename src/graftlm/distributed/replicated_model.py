"""A model of which there are several, each in an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from graftlm.adapters import AdapterRegistry, LoadedAdapter
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.cores import cores_each
from graftlm.distributed.replica_group import ReplicaPool
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.replica_set import ReplicaSet
from graftlm.distributed.shared_cache import plan_shared_cache
from graftlm.engine.adapter_loader import ReadWeights
from graftlm.engine.cache_plan import DEFAULT_KV_CACHE_BYTES
from graftlm.engine.executor import BetweenSteps, MovedStage, WorkerInfo
from graftlm.engine.memory import available_bytes
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.residency import Residency
from graftlm.errors import ConfigurationError
from graftlm.models.base_weights import CheckpointWeights
from graftlm.models.decoder import Decoder
from graftlm.models.layout import lay_out
from graftlm.models.read import read_spec

_CPU = torch.device("cpu")
# The set refuses what is too much, before anything is sent.
_UNLIMITED = 2**31 - 1
# Of a replica that drains: most answers are complete by then, and the others are computed again as far as they are.
FINISH_SECONDS = 30.0


class ReplicatedModel:
    """`ComputableModel` on replicas, which start when it is asked for what runs jobs. Those that are to have workers
    start them where they are.

    Args:
        checkpoint: of the model, which adapters are checked against. make_pool: where the replicas come from.
        finish_seconds: that a replica which drains has for the requests it has begun.

    Raises:
        ConfigurationError, CheckpointError
    """

    decoder: Decoder | None = None

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        make_pool: Callable[[EngineConfig], ReplicaPool],
        *,
        finish_seconds: float = FINISH_SECONDS,
    ) -> None:
        if config.device not in ("auto", "cpu"):
            raise ConfigurationError("replicas compute on the CPU", got=config.device, allowed="auto, cpu")
        self.has_all_layers = not config.has_workers
        self._config = _config_of_each(config)
        self._make_pool = make_pool
        self._finish_seconds = finish_seconds
        self._replicas: ReplicaSet | None = None
        family, spec = read_spec(checkpoint)
        self._num_layers = len(spec.layers)
        self.vocab_size = spec.vocab_size
        self.plan = plan_shared_cache(self._config, checkpoint, spec, lay_out(spec, family.names))
        # One of its own: the other is closed once everything has been read.
        self.base = CheckpointWeights(open_checkpoint(config.model))

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return () if self._replicas is None else self._replicas.workers

    @property
    def num_lost_workers(self) -> int:
        return 0 if self._replicas is None else self._replicas.num_lost_workers

    @property
    def num_moves(self) -> int:
        return 0 if self._replicas is None else self._replicas.num_moves

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        assert self._replicas is not None
        return self._replicas.drain(target, between_steps, finish_seconds=self._finish_seconds)

    def runner(
        self,
        config: EngineConfig,
        *,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
        residency: Residency[LoadedAdapter],
        read_weights: ReadWeights,
        wake: Callable[[], None] | None,
    ) -> ReplicaSet:
        """As `ComputableModel.runner`; replicas read weights themselves."""
        assert isinstance(residency, ReplicaResidency)
        self._replicas = ReplicaSet(
            self._make_pool(config),
            config,
            self._config,
            num_layers=self._num_layers,
            registry=registry,
            metrics=metrics,
            residency=residency,
            wake=wake,
        )
        return self._replicas

    def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()


def _config_of_each(config: EngineConfig) -> EngineConfig:
    """A replica's own: its share of this machine's memory, no adapters yet, paths that mean the same elsewhere."""
    model = Path(config.model)
    default_bytes = min(DEFAULT_KV_CACHE_BYTES, available_bytes(_CPU) // (2 * config.num_replicas))
    return replace(
        config,
        model=model.absolute() if model.exists() else config.model,
        name=None,
        adapters={},
        adapter_dir=None,
        device="cpu",
        kv_cache_bytes=config.kv_cache_bytes or default_bytes,
        max_queued_requests=_UNLIMITED,
        replicas=None,
        worker_cpus=cores_each(config) if config.has_workers else None,
        ray_address=None,
    )
