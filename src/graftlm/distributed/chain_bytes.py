"""What a model's layers take in memory, estimated before any of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.config import EngineConfig
from graftlm.distributed.partition import chain_work, table_weights
from graftlm.engine.load_options import choose_dtype, load_policy
from graftlm.layers.kv_cache import kv_bytes_per_token
from graftlm.models.cache_layout import cache_shapes
from graftlm.models.layout import ModelLayout
from graftlm.models.spec import ModelSpec
from graftlm.models.stored_weights import stored_quantization
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.routing.spans import ChainWeights

# A matrix of which a format's bytes per parameter are read off.
_SAMPLE = (256, 1024)


def chain_bytes(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, layout: ModelLayout, num_blocks: Sequence[int]
) -> ChainWeights:
    """Bytes of each layer's matrices, as the config will have them held, and of its keys and values. A table that both
    ends use counts twice, since both hold it.

    Args:
        num_blocks: of each cache group.

    Raises:
        CheckpointError, ConfigurationError
    """
    work, (before, looked_up) = chain_work(spec, layout), table_weights(layout)
    dtype = choose_dtype(config.dtype, checkpoint)
    policy = load_policy(config, checkpoint)
    # Of the layers' matrices; of tables and the head.
    layer_rate, end_rate = Fraction(dtype.itemsize), Fraction(dtype.itemsize)
    if policy.quantization is not None:
        layer_rate = _quantized_rate(policy.quantization, dtype)
        end_rate = layer_rate if policy.quantize_head else end_rate
    elif policy.keep_stored and stored_quantization(checkpoint) is not None:
        layer_rate = end_rate = min(
            layer_rate, _stored_rate(checkpoint, spec, work, before + looked_up * len(work.layers))
        )
    cached = _cached_bytes(config, spec, num_blocks, dtype)
    return ChainWeights(
        layers=tuple(
            int(layer_rate * weight + end_rate * looked_up) + kept
            for weight, kept in zip(work.layers, cached, strict=True)
        ),
        before=int(end_rate * before),
        after=int(end_rate * work.after),
    )


def _quantized_rate(name: str, dtype: torch.dtype) -> Fraction:
    weight = QUANTIZERS[name].quantize(torch.ones(_SAMPLE, dtype=dtype), dtype=dtype)
    return Fraction(weight.num_bytes, _SAMPLE[0] * _SAMPLE[1])


def _stored_rate(checkpoint: Checkpoint, spec: ModelSpec, work: ChainWeights, in_tables: int) -> Fraction:
    num_stored = sum(work.layers) + in_tables + (0 if spec.head.tied else work.after)
    return Fraction(sum(identity.size for identity in checkpoint.weight_files.values()), num_stored)


def _cached_bytes(config: EngineConfig, spec: ModelSpec, num_blocks: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Of each layer; one that reads another's keys and values has none."""
    shapes = iter(cache_shapes(spec))
    cached = []
    for layer in spec.layers:
        if layer.attention.kv_layer is not None:
            cached.append(0)
            continue
        shape = next(shapes)
        cached.append(num_blocks[shape.group] * config.block_size * kv_bytes_per_token([shape], dtype))
    return cached
