"""The KV cache of a model that ranks share out by tensors: each has the keys and values of its own heads."""

from __future__ import annotations

from dataclasses import replace

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.activation_journal import journal_bytes_per_token
from graftlm.engine.cache_plan import CachePlan, plan_cache
from graftlm.engine.load_options import choose_dtype
from graftlm.models.cache_layout import cache_shapes, cache_windows
from graftlm.models.divide import boundary_width
from graftlm.models.layout import ModelLayout
from graftlm.models.spec import ModelSpec
from graftlm.models.tensor_share import share_model


def plan_shared_cache(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, layout: ModelLayout) -> CachePlan:
    """What fits into the memory of the rank that has most keys and values, if there are ranks, beside the stages'
    journals.

    Raises:
        CheckpointError: the checkpoint's dtype is not computed in.
        ConfigurationError: as `plan_cache`, or the model cannot be divided among so many ranks.
    """
    dtype = choose_dtype(config.dtype, checkpoint)
    return plan_cache(
        config,
        cache_shapes(_largest_share(spec, layout, config.tensor_parallel)),
        cache_windows(spec),
        context_len=spec.max_position_embeddings,
        dtype=dtype,
        device=torch.device("cpu"),
        journal_bytes=_journal_bytes(config, spec, dtype),
    )


def _journal_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a token takes in the journals of all stages together: the last one has none."""
    if not config.activation_journal:
        return 0
    return (config.num_stages - 1) * journal_bytes_per_token(boundary_width(spec), dtype)


def _largest_share(spec: ModelSpec, layout: ModelLayout, num_ranks: int) -> ModelSpec:
    """The model as the first rank sees it, which has as much as any."""
    if num_ranks == 1:
        return spec
    return replace(spec, layers=share_model(spec, layout, rank=0, size=num_ranks).layers)
