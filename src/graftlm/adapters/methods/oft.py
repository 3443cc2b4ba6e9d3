"""OFT: each group of a module's inputs is rotated before the weight.

Sources: arXiv 2306.07280; peft/tuners/oft (0.21) for both ways to make a rotation of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_count, read_flag, read_number
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.each_module import compile_each_module
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterUnsupported
from graftlm.layers.transforms import BlockRotation
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS
    | {
        "bias",
        "block_share",
        "coft",
        "eps",
        "exclude_modules",
        "num_cayley_neumann_terms",
        "oft_block_size",
        "r",
        "use_cayley_neumann",
    },
    inert=frozenset({"fan_in_fan_out", "init_weights", "module_dropout"}),
)
ROLE = "oft_R.weight"


@dataclass(frozen=True, kw_only=True)
class _Rotation:
    """What makes rotations of parameters. eps: largest norm of all blocks together, None without a limit (COFT).
    num_terms: of the Neumann series; None for the exact Cayley transform."""

    num_blocks: int
    block_size: int
    is_shared: bool
    eps: float | None
    num_terms: int | None

    def blocks_of(self, in_features: int) -> tuple[int, int]:
        """(number, size) of a module's blocks. PEFT takes the nearest numbers that divide its inputs."""
        if self.block_size:
            size = _nearest_divisor(in_features, self.block_size)
            return in_features // size, size
        number = _nearest_divisor(in_features, self.num_blocks)
        return number, in_features // number


def compile_oft(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type OFT. Its form for embeddings is not served.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    rotation = _parse_rotation(raw)

    def adapt(module: str, builder: PatchBuilder) -> None:
        number, size = rotation.blocks_of(base.sites.linears[module].in_features)
        vectors = tensors.require(module, ROLE).to(base.device).float()
        check_shape(f"{ROLE} of {module}", vectors, (1 if rotation.is_shared else number, size * (size - 1) // 2))
        builder.transform_input(module, BlockRotation(blocks=_rotations(vectors, size, rotation)))

    return compile_each_module("OFT", config, tensors, base, role=ROLE, adaptable=base.sites.plain_linears, adapt=adapt)


def _parse_rotation(raw: Mapping[str, Any]) -> _Rotation:
    if "oft_block_size" not in raw:
        raise AdapterUnsupported(
            "adapter_config.json: oft_block_size is missing: this OFT adapter is from before PEFT 0.14, whose tensors "
            "mean something else",
            do="train it again; PEFT itself refuses it too",
        )
    num_blocks = read_count("r", raw.get("r"), 0)
    block_size = read_count("oft_block_size", raw["oft_block_size"], 0)
    if (num_blocks == 0) == (block_size == 0):
        raise AdapterCorrupt(
            "adapter_config.json: one of r and oft_block_size has to be 0, the other not",
            got=f"r={num_blocks}, oft_block_size={block_size}",
        )
    is_series = read_flag("use_cayley_neumann", raw.get("use_cayley_neumann", True))
    return _Rotation(
        num_blocks=num_blocks,
        block_size=block_size,
        is_shared=read_flag("block_share", raw.get("block_share")),
        eps=read_number("eps", raw.get("eps"), 6e-5) if read_flag("coft", raw.get("coft")) else None,
        num_terms=read_count("num_cayley_neumann_terms", raw.get("num_cayley_neumann_terms"), 5) if is_series else None,
    )


def _rotations(vectors: Tensor, size: int, rotation: _Rotation) -> Tensor:
    """[n, size * (size - 1) / 2], the upper triangles of skew-symmetric matrices -> [n, size, size]."""
    rows, columns = torch.triu_indices(size, size, 1, device=vectors.device)
    skew = vectors.new_zeros(len(vectors), size, size)
    skew[:, rows, columns] = vectors
    skew = skew - skew.transpose(1, 2)
    if rotation.eps is not None:
        limit = rotation.eps / math.sqrt(len(skew))
        norms = skew.norm(dim=(1, 2), keepdim=True)
        skew = torch.where(norms <= limit, skew, skew * (limit / norms))
    return cayley(skew) if rotation.num_terms is None else _neumann(skew, rotation.num_terms)


def cayley(skew: Tensor) -> Tensor:
    """(1 - S) (1 + S)^-1 of skew-symmetric matrices, [n, b, b]."""
    identity = torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)
    rotations: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
    return rotations


def _neumann(skew: Tensor, num_terms: int) -> Tensor:
    """(1 + S) (1 - S)^-1 as PEFT cuts off its series: 1 + 2 S + 2 S^2 + ... + S^n, the last term once."""
    result = torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)
    if num_terms < 2:
        return result
    if num_terms == 2:
        return result + 2 * skew
    last = max(3, num_terms - 1)
    power = skew
    for _ in range(1, last):
        result = result + 2 * power
        power = power @ skew
    return result + power


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the lower one of two."""
    if wanted >= number:
        return number
    higher = next(candidate for candidate in range(wanted, number + 1) if number % candidate == 0)
    lower = next(candidate for candidate in range(wanted, 0, -1) if number % candidate == 0)
    return lower if wanted - lower <= higher - wanted else higher
