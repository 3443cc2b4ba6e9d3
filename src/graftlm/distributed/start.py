"""Serving a model on workers: who gets which layers, and a pipeline over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from graftlm.adapters import LoadedAdapter
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.activation_journal import journal_bytes_per_token
from graftlm.distributed.gang import GangPool
from graftlm.distributed.messages import StagePlan
from graftlm.distributed.partition import balanced_spans, end_weights, explicit_spans, layer_weights
from graftlm.distributed.pipeline import PipelineExecutor
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.replicated_model import ReplicatedModel
from graftlm.distributed.worker import WorkerPool
from graftlm.engine.cache_plan import plan_cache
from graftlm.engine.load_options import choose_dtype
from graftlm.engine.residency import Residency
from graftlm.engine.served_model import ServedModel
from graftlm.errors import ConfigurationError
from graftlm.models.base_weights import CheckpointWeights
from graftlm.models.cache_layout import cache_shapes, cache_windows
from graftlm.models.divide import check_divisible
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import ModelLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.spec import ModelSpec
from graftlm.models.tensor_share import share_model

_CPU = torch.device("cpu")


def serve_on_ray(config: EngineConfig, checkpoint: Checkpoint, residency: Residency[LoadedAdapter]) -> ServedModel:
    """Load a model into Ray actors, on a cluster that is there or on one started for it on this machine.

    Raises:
        ConfigurationError: Ray is not installed, or cannot be reached.
        CheckpointError
    """
    with _importing_ray(config):
        from graftlm.distributed.ray_workers import RayPool
    return serve_on_workers(config, checkpoint, residency, RayPool(config))


def serve_on_replicas(config: EngineConfig, checkpoint: Checkpoint) -> ReplicatedModel:
    """A model on as many whole engines as the config says, in Ray actors.

    Raises:
        ConfigurationError: Ray is not installed.
        CheckpointError
    """
    with _importing_ray(config):
        from graftlm.distributed.ray_replicas import RayReplicaPool
    return ReplicatedModel(config, checkpoint, RayReplicaPool)


def residency_on_replicas(config: EngineConfig) -> ReplicaResidency:
    """Where the adapters of replicas are."""
    return ReplicaResidency(config.adapter_memory_bytes)


@contextmanager
def _importing_ray(config: EngineConfig) -> Iterator[None]:
    if config.ray_address is None:
        # Ray reads it when it is imported. Off, the node's address is 127.0.0.1, and nothing listens on any other.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        yield
    except ImportError as cause:
        raise ConfigurationError(
            "workers and replicas need Ray", got=str(cause), do="pip install 'graftlm[ray]'"
        ) from cause


def serve_on_workers(
    config: EngineConfig, checkpoint: Checkpoint, residency: Residency[LoadedAdapter], pool: WorkerPool
) -> ServedModel:
    """Load a model into workers of a pool, which is closed with the executor, or if this fails.

    Raises:
        ConfigurationError, CheckpointError
    """
    try:
        if config.device not in ("auto", "cpu"):
            raise ConfigurationError("workers compute on the CPU", got=config.device, allowed="auto, cpu")
        family, spec = read_spec(checkpoint)
        layout = lay_out(spec, family.names)
        dtype = choose_dtype(config.dtype, checkpoint)
        plan = plan_cache(
            config,
            cache_shapes(_largest_share(config, spec, layout)),
            cache_windows(spec),
            context_len=spec.max_position_embeddings,
            dtype=dtype,
            device=_CPU,
            journal_bytes=_journal_bytes(config, spec, dtype),
        )
        spans = _spans(config, layout)
        for span in spans:
            check_divisible(spec, span)
        # One of its own: this one is closed once everything has been read.
        base = CheckpointWeights(open_checkpoint(config.model))
    except BaseException:
        pool.close()
        raise
    if config.tensor_parallel > 1:
        pool = GangPool(pool, config.tensor_parallel)
    stages = [StagePlan(config=config, span=span, num_blocks=plan.num_blocks) for span in spans]
    return ServedModel(
        executor=PipelineExecutor(
            pool,
            stages,
            residency=residency,
            depth=config.steps_in_flight or config.num_stages,
            patience_seconds=config.worker_timeout_seconds,
        ),
        has_all_layers=False,
        base=base,
        plan=plan,
        windows=cache_windows(spec),
        length_regimes=spec.length_regimes,
        vocab_size=spec.vocab_size,
    )


def _largest_share(config: EngineConfig, spec: ModelSpec, layout: ModelLayout) -> ModelSpec:
    """The model as the rank with most keys and values sees it: the first."""
    if config.tensor_parallel == 1:
        return spec
    return replace(spec, layers=share_model(spec, layout, rank=0, size=config.tensor_parallel).layers)


def _journal_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a token takes in the journals of all stages together: the last one has none."""
    if not config.activation_journal:
        return 0
    return (config.num_stages - 1) * journal_bytes_per_token(spec.hidden_size, dtype)


def _spans(config: EngineConfig, layout: ModelLayout) -> tuple[LayerSpan, ...]:
    if config.worker_layers:
        return explicit_spans(config.worker_layers, len(layout.layers))
    before, after = end_weights(layout)
    return balanced_spans(layer_weights(layout), config.num_stages, before=before, after=after)
