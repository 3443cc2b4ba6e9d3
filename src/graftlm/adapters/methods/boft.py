"""BOFT: inputs are rotated by a product of butterfly factors, outputs scaled.

Sources: arXiv 2311.06243; peft/tuners/boft (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_count
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.each_module import compile_each_module
from graftlm.adapters.methods.oft import cayley
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.layers.transforms import Affine, BlockRotation, Successive
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "boft_block_num", "boft_block_size", "boft_n_butterfly_factor", "exclude_modules"},
    inert=frozenset({"boft_dropout", "fan_in_fan_out", "init_weights"}),
)


def compile_boft(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type BOFT.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    block_size = read_count("boft_block_size", raw.get("boft_block_size"), 4)
    num_blocks = read_count("boft_block_num", raw.get("boft_block_num"), 0)
    num_factors = read_count("boft_n_butterfly_factor", raw.get("boft_n_butterfly_factor"), 1)
    if (num_blocks == 0) == (block_size == 0):
        raise AdapterCorrupt(
            "adapter_config.json: one of boft_block_num and boft_block_size has to be 0, the other not",
            got=f"boft_block_num={num_blocks}, boft_block_size={block_size}",
        )

    def adapt(module: str, builder: PatchBuilder) -> None:
        site = base.sites.linears[module]
        blocks = tensors.require(module, "boft_R").to(base.device).float()
        scale = tensors.require(module, "boft_s").to(base.device).float()
        size = block_size or site.in_features // num_blocks
        # Without its CUDA extension PEFT trains and saves one factor, whatever the config says.
        count = 1 if blocks.shape[0] == 1 else num_factors
        check_shape(f"boft_R of {module}", blocks, (count, num_blocks or site.in_features // size, size, size))
        check_shape(f"boft_s of {module}", scale, (site.out_features, 1))
        _check_divides(module, site.in_features, size, count)
        builder.transform_input(module, _butterfly(blocks))
        # The bias is not scaled: (W x + b) * s + (b - b * s).
        scale, bias = scale.flatten(), base.bias(module)
        shift = None if bias is None else bias.float() * (1 - scale)
        builder.transform_output(module, Affine(scale=scale, shift=shift))

    return compile_each_module(
        "BOFT", config, tensors, base, role="boft_R", adaptable=base.sites.plain_linears, adapt=adapt
    )


def _check_divides(module: str, in_features: int, block_size: int, num_factors: int) -> None:
    # A factor mixes the halves of blocks twice as far apart as the one before it.
    span = block_size << (num_factors - 1)
    if in_features % span or (num_factors > 1 and block_size % 2):
        raise AdapterIncompatible(
            f"the inputs of {module} cannot be divided into {num_factors} butterfly factors of blocks of {block_size}",
            got=in_features,
            allowed=f"multiples of {span}, even blocks",
        )


def _butterfly(parameters: Tensor) -> Successive:
    """parameters: [factors, blocks, b, b], any matrices: their skew-symmetric part counts."""
    num_factors, num_blocks, size, _ = parameters.shape
    skew = (parameters - parameters.transpose(2, 3)) / 2
    rotations = cayley(skew.flatten(0, 1)).view_as(skew)
    factors = []
    for index in reversed(range(num_factors)):
        order = None if num_factors == 1 else _order(num_blocks * size, size << index, size // 2)
        factors.append(BlockRotation(blocks=rotations[index], order=None if order is None else order.to(skew.device)))
    return Successive(transforms=tuple(factors))


def _order(length: int, span: int, half: int) -> Tensor:
    """Where the inputs of a factor come from: within each `span`, PEFT deals its halves of blocks out, those with even
    numbers to the first half, those with odd ones to the second."""
    dealt = torch.arange(length).view(length // span, span // half, half)
    dealt = torch.cat([dealt[:, 0::2], dealt[:, 1::2]], dim=1).flatten()
    return dealt.argsort()
