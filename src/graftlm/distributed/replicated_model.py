"""A model of which there are several, each in an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from graftlm.adapters import AdapterRegistry, LoadedAdapter
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.replica_group import ReplicaPool
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.replica_set import ReplicaSet
from graftlm.engine.adapter_loader import ReadWeights
from graftlm.engine.cache_plan import DEFAULT_KV_CACHE_BYTES, plan_cache
from graftlm.engine.executor import BetweenSteps, MovedStage, WorkerInfo
from graftlm.engine.load_options import choose_dtype
from graftlm.engine.memory import available_bytes
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.residency import Residency
from graftlm.errors import ConfigurationError, DrainFailed
from graftlm.models.base_weights import CheckpointWeights
from graftlm.models.cache_layout import cache_shapes, cache_windows
from graftlm.models.decoder import Decoder
from graftlm.models.read import read_spec

_CPU = torch.device("cpu")
# The set refuses what is too much, before anything is sent.
_UNLIMITED = 2**31 - 1


class ReplicatedModel:
    """`ComputableModel` on replicas, which start when it is asked for what runs jobs.

    Args:
        checkpoint: of the model, which adapters are checked against. make_pool: where the replicas come from.

    Raises:
        ConfigurationError, CheckpointError
    """

    has_all_layers = True
    decoder: Decoder | None = None

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, make_pool: Callable[[EngineConfig], ReplicaPool]
    ) -> None:
        if config.device not in ("auto", "cpu"):
            raise ConfigurationError("replicas compute on the CPU", got=config.device, allowed="auto, cpu")
        self._config = _config_of_each(config)
        self._make_pool = make_pool
        self._replicas: ReplicaSet | None = None
        _, spec = read_spec(checkpoint)
        self._num_layers = len(spec.layers)
        self.vocab_size = spec.vocab_size
        self.plan = plan_cache(
            self._config,
            cache_shapes(spec),
            cache_windows(spec),
            context_len=spec.max_position_embeddings,
            dtype=choose_dtype(config.dtype, checkpoint),
            device=_CPU,
        )
        # One of its own: the other is closed once everything has been read.
        self.base = CheckpointWeights(open_checkpoint(config.model))

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return () if self._replicas is None else self._replicas.workers

    @property
    def num_lost_workers(self) -> int:
        return 0 if self._replicas is None else self._replicas.num_lost_workers

    # Replicas stay where they are, with all layers.
    num_moves = 0

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        raise DrainFailed("replicas cannot be drained", got=target, do="start a server with fewer, or with workers")

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
        worker_cpus=None,
        ray_address=None,
    )
