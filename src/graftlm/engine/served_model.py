"""A base model that is ready to compute, wherever that is."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.adapters import LoadedAdapter
from graftlm.checkpoint import Checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import load_decoder
from graftlm.engine.cache_plan import CachePlan, plan_cache
from graftlm.engine.executor import Executor, LocalExecutor
from graftlm.engine.load_options import choose_device
from graftlm.engine.residency import Residency
from graftlm.engine.span_runner import SpanRunner
from graftlm.kernels.registry import choose_kernels
from graftlm.models.base_weights import BaseWeights, DecoderWeights
from graftlm.models.decoder import Decoder
from graftlm.models.length_regimes import LengthRegimes


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What an engine needs of a model.

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
