"""Serving a model on workers: who gets which layers, and a pipeline over them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from graftlm.adapters import LoadedAdapter
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.chain_bytes import chain_bytes
from graftlm.distributed.gang import GangPool
from graftlm.distributed.messages import StagePlan, WorkerMeasure
from graftlm.distributed.partition import capacities, chain_work, explicit_spans, spans_of
from graftlm.distributed.pipeline import PipelineExecutor
from graftlm.distributed.probe import Probe
from graftlm.distributed.ray_node import ALONE, LOOPBACK, authentication, token_file
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.replicated_model import ReplicatedModel
from graftlm.distributed.shared_cache import plan_shared_cache
from graftlm.distributed.span_balance import SpanBalance
from graftlm.distributed.worker import Worker, WorkerLost, WorkerPool
from graftlm.engine.load_options import choose_dtype
from graftlm.engine.residency import Residency
from graftlm.engine.served_model import ServedModel
from graftlm.errors import ConfigurationError, EngineClosed
from graftlm.models.base_weights import CheckpointWeights
from graftlm.models.cache_layout import cache_windows
from graftlm.models.divide import check_divisible
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import ModelLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.spec import ModelSpec
from graftlm.routing.spans import Capacity, best_bounds

if TYPE_CHECKING:
    from graftlm.distributed.serve_ingress import ServeIngress

# Starting a process and importing torch, on a machine that is busy with it.
START_SECONDS = 900.0


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
    """A model on as many whole engines as the config says, in Ray actors, each with workers if it says so.

    Raises:
        ConfigurationError: Ray is not installed, or the layers cannot be shared out among so many workers.
        CheckpointError
    """
    if config.has_workers:
        family, spec = read_spec(checkpoint)
        _check_shares(config, spec, lay_out(spec, family.names))
    with _importing_ray(config):
        from graftlm.distributed.ray_replicas import RayReplicaPool
    return ReplicatedModel(config, checkpoint, RayReplicaPool)


def serve_behind_ray_serve(
    build: Callable[[], object],
    config: EngineConfig,
    *,
    host: str,
    port: int,
    keep_alive_seconds: int,
    drain_seconds: float,
) -> ServeIngress:
    """An ASGI application behind Ray Serve's proxy, as `ServeIngress` describes it.

    Raises:
        ConfigurationError: Ray Serve is not installed, or as `ServeIngress` does.
    """
    token = token_file()
    if config.ray_address is None and token is not None and not token.exists():
        # Ray Serve's process listens at all addresses of its machine and unpickles what it gets: without a token,
        # whoever reaches its port could run any code here. This one is the new cluster's alone.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with _importing_ray(config):
        import ray  # noqa: F401
    try:
        from graftlm.distributed.serve_ingress import ServeIngress
    except ImportError as cause:
        raise ConfigurationError(
            "Ray Serve is not installed", got=str(cause).partition(".")[0], do="pip install 'graftlm[ray-serve]'"
        ) from cause
    return ServeIngress(
        build, config, host=host, port=port, keep_alive_seconds=keep_alive_seconds, drain_seconds=drain_seconds
    )


def residency_on_replicas(config: EngineConfig) -> ReplicaResidency:
    """Where the adapters of replicas are."""
    return ReplicaResidency(config.adapter_memory_bytes)


@contextmanager
def _importing_ray(config: EngineConfig) -> Iterator[None]:
    address = config.ray_address
    if address is None or address.rpartition(":")[0] in LOOPBACK:
        # Ray reads it when it is imported. The node's address is 127.0.0.1 then, and nothing listens on any other.
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
    if address is None and "ray" not in sys.modules:
        token = token_file()
        if token is None or token.exists():
            # Ray would ask for it by itself, and print that it does.
            os.environ.update(authentication())
    # Read at import too. Otherwise a call after the cluster has ended would connect to any other that it finds, and a
    # lost worker be replaced there.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
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
    workers: tuple[Worker, ...] = ()
    try:
        if config.device not in ("auto", "cpu"):
            raise ConfigurationError("workers compute on the CPU", got=config.device, allowed="auto, cpu")
        family, spec = read_spec(checkpoint)
        layout = lay_out(spec, family.names)
        plan = plan_shared_cache(config, checkpoint, spec, layout)
        if config.tensor_parallel > 1:
            pool = GangPool(pool, config.tensor_parallel)
        work = chain_work(spec, layout)
        memory = chain_bytes(config, checkpoint, spec, layout, plan.num_blocks)
        if config.worker_layers:
            spans = _told_spans(config, spec)
        else:
            workers, measures = _measured(pool, config, Probe.of(layout, choose_dtype(config.dtype, checkpoint)))
            spans = spans_of(best_bounds(work, capacities(measures), memory=memory))
        # One of its own: this one is closed once everything has been read.
        base = CheckpointWeights(open_checkpoint(config.model))
    except BaseException:
        for worker in workers:
            worker.kill()
        pool.close()
        raise
    stages = [StagePlan(config=config, span=span, num_blocks=plan.num_blocks) for span in spans]
    return ServedModel(
        executor=PipelineExecutor(
            pool,
            stages,
            workers=workers,
            balance=SpanBalance(work, memory) if config.rebalance else None,
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


def _check_shares(config: EngineConfig, spec: ModelSpec, layout: ModelLayout) -> None:
    """Raise ConfigurationError if the layers cannot be shared out so, whatever the workers can do."""
    if config.worker_layers:
        _told_spans(config, spec)
        return
    work = chain_work(spec, layout)
    best_bounds(work, [Capacity(speed=Fraction(1))] * config.num_stages, memory=work)


def _told_spans(config: EngineConfig, spec: ModelSpec) -> tuple[LayerSpan, ...]:
    spans = explicit_spans(config.worker_layers, len(spec.layers))
    for span in spans:
        check_divisible(spec, span)
    return spans


def _measured(
    pool: WorkerPool, config: EngineConfig, probe: Probe
) -> tuple[tuple[Worker, ...], tuple[WorkerMeasure, ...]]:
    """A worker for each stage, and what it can do.

    Raises:
        EngineClosed: one is lost.
    """
    workers: list[Worker] = []
    try:
        workers.extend(pool.take({}) for _ in range(config.num_stages))
        calls = [worker.measure(probe) for worker in workers]
        return tuple(workers), tuple(call.result(START_SECONDS) for call in calls)
    except BaseException as error:
        for worker in workers:
            worker.kill()
        if isinstance(error, WorkerLost):
            raise EngineClosed(f"a worker was lost while it started: {error}", do="look at its node's logs") from error
        raise
