"""A base model that is ready to compute, wherever that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graftlm.adapters import AdapterRegistry, LoadedAdapter
from graftlm.checkpoint import Checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.adapter_loader import BackgroundLoader, InlineLoader, ReadWeights
from graftlm.engine.base import load_decoder
from graftlm.engine.block_pool import BlockPool
from graftlm.engine.cache_blocks import CacheBlocks, CacheGroup
from graftlm.engine.cache_plan import CachePlan, plan_cache
from graftlm.engine.core import EngineCore
from graftlm.engine.executor import BetweenSteps, Executor, LocalExecutor, MovedStage, WorkerInfo
from graftlm.engine.load_options import choose_device
from graftlm.engine.metrics import EngineMetrics
from graftlm.engine.policy import FairShare, FirstComeFirstServed
from graftlm.engine.residency import Residency
from graftlm.engine.scheduler import Scheduler
from graftlm.engine.span_runner import SpanRunner
from graftlm.kernels.registry import choose_kernels
from graftlm.models.base_weights import BaseWeights, DecoderWeights
from graftlm.models.decoder import Decoder
from graftlm.models.length_regimes import LengthRegimes


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that an executor computes with, for an engine core in this process.

    has_all_layers: whether one process has, which can run them in any order.
    decoder: the model itself, if it is in this process.
    base: what adapters are checked against. plan: the KV cache's. windows: how far back each cache group sees.
    """

    executor: Executor
    has_all_layers: bool
    base: BaseWeights
    plan: CachePlan
    windows: tuple[int | None, ...]
    length_regimes: LengthRegimes
    vocab_size: int
    decoder: Decoder | None = None

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.executor.workers

    @property
    def num_lost_workers(self) -> int:
        return self.executor.num_lost_workers

    @property
    def num_moves(self) -> int:
        return self.executor.num_moves

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        """As `Executor.drain`."""
        return self.executor.drain(target, between_steps)

    def runner(
        self,
        config: EngineConfig,
        *,
        registry: AdapterRegistry,
        metrics: EngineMetrics,
        residency: Residency[LoadedAdapter],
        read_weights: ReadWeights,
        wake: Callable[[], None] | None,
    ) -> EngineCore:
        """As `ComputableModel.runner`."""
        groups = [
            CacheGroup(window=window, pool=BlockPool(num_blocks))
            for window, num_blocks in zip(self.windows, self.plan.num_blocks, strict=True)
        ]
        blocks = CacheBlocks(groups, block_size=config.block_size, chunk_tokens=config.chunk_tokens)
        scheduler = Scheduler(
            blocks,
            residency=residency,
            policy=FairShare(config.fair_shares) if config.scheduling == "fair" else FirstComeFirstServed(),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_cache=config.prefix_cache,
            length_regimes=self.length_regimes,
            num_in_flight=self.executor.depth,
        )
        return EngineCore(
            scheduler=scheduler,
            executor=self.executor,
            blocks=blocks,
            registry=registry,
            metrics=metrics,
            residency=residency,
            loader=InlineLoader(read_weights) if wake is None else BackgroundLoader(read_weights, wake),
            kernels=choose_kernels(torch.device("cpu"), deterministic=config.deterministic),
        )

    def close(self) -> None:
        self.executor.close()


def serve_here(config: EngineConfig, checkpoint: Checkpoint, residency: Residency[LoadedAdapter]) -> ServedModel:
    """Load a model into this process.

    Args:
        residency: where the adapters are.

    Raises:
        ConfigurationError, CheckpointError
    """
    kernels = choose_kernels(choose_device(config.device), deterministic=config.deterministic)
    decoder = load_decoder(config, checkpoint, kernels)
    plan = plan_cache(
        config,
        decoder.kv_shapes,
        decoder.windows,
        context_len=decoder.max_position_embeddings,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    return ServedModel(
        executor=LocalExecutor(
            SpanRunner(
                decoder,
                num_blocks=plan.num_blocks,
                block_size=config.block_size,
                kernels=kernels,
            ),
            residency,
        ),
        has_all_layers=True,
        base=DecoderWeights(decoder),
        plan=plan,
        windows=decoder.windows,
        length_regimes=decoder.length_regimes,
        vocab_size=decoder.vocab_size,
        decoder=decoder,
    )
