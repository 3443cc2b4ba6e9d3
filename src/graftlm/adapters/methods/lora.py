"""LoRA and rsLoRA on linear layers (arXiv 2106.09685, 2312.03732)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.adapters.adapter import BoundModule
from graftlm.adapters.config import LoraConfig
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.patch import LinearPatch, Slot
from graftlm.models.site import LinearSite, SiteMap


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """lora_a: [R, in] and lora_b: [out, R], as saved."""

    lora_a: Tensor
    lora_b: Tensor


def compile_lora(
    config: LoraConfig, pairs: Mapping[str, LoraPair], sites: SiteMap, device: torch.device
) -> tuple[dict[Slot, LinearPatch], tuple[BoundModule, ...]]:
    """Turn the pairs of an adapter into one patch per fused layer.

    Factors become float32 whatever they were saved in, and B carries the scaling: PEFT, too, computes 16-bit adapters
    in float32.

    Args:
        pairs: module path -> its pair; every path is a linear site.

    Raises:
        AdapterIncompatible: a shape does not fit the base.
        AdapterCorrupt: ranks of A, B and the config disagree.
    """
    bound = []
    by_slot: dict[Slot, list[tuple[LinearSite, LoraPair, float]]] = defaultdict(list)
    for path, site in sites.linears.items():
        if path not in pairs:
            continue
        pair = pairs[path]
        rank = _check_shapes(config, site, pair)
        scaling = config.scaling_of(path, rank)
        bound.append(BoundModule(path=path, rank=rank, scaling=scaling))
        by_slot[site.slot].append((site, pair, scaling))
    patches = {slot: _fuse(parts, device) for slot, parts in by_slot.items()}
    return patches, tuple(bound)


def _check_shapes(config: LoraConfig, site: LinearSite, pair: LoraPair) -> int:
    """The pair's rank, after everything about its shapes was checked."""
    a_shape, b_shape = tuple(pair.lora_a.shape), tuple(pair.lora_b.shape)
    if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or a_shape[0] == 0:
        raise AdapterCorrupt(
            f"lora_A and lora_B of {site.path} do not form a pair",
            got=f"{list(a_shape)} and {list(b_shape)}",
            allowed="[rank, in] and [out, rank], rank at least 1 (empty or flat tensors come from an incomplete shard)",
        )
    if a_shape[1] != site.in_features or b_shape[0] != site.out_features:
        raise AdapterIncompatible(
            f"{site.path} has another shape in this base",
            got=f"lora_A {list(a_shape)}, lora_B {list(b_shape)}",
            allowed=f"lora_A [rank, {site.in_features}], lora_B [{site.out_features}, rank]",
            do="load it over the base it was trained on",
        )
    expected = config.rank_of(site.path)
    if a_shape[0] != expected:
        raise AdapterCorrupt(
            f"the rank of {site.path} differs between config and weights",
            got=f"{a_shape[0]} in the weights, {expected} in adapter_config.json",
        )
    return a_shape[0]


def _fuse(parts: list[tuple[LinearSite, LoraPair, float]], device: torch.device) -> LinearPatch:
    expands = []
    rank_start = 0
    for site, pair, scaling in parts:
        rank = pair.lora_a.shape[0]
        expands.append(
            LoraExpand(
                matrix=_scaled(pair.lora_b.to(device, torch.float32), scaling, site.path).t().contiguous(),
                out_start=site.start,
                out_stop=site.stop,
                rank_start=rank_start,
                rank_stop=rank_start + rank,
            )
        )
        rank_start += rank
    stacked = torch.cat([pair.lora_a.to(device, torch.float32) for _, pair, _ in parts])
    return LinearPatch(low_rank=LoraUpdate(shrink=stacked.t(), expands=tuple(expands)))


def _scaled(lora_b: Tensor, scaling: float, path: str) -> Tensor:
    # A tensor, since torch refuses a Python number beyond float32.
    scaled = lora_b * torch.tensor(scaling, dtype=torch.float32, device=lora_b.device)
    if not torch.isfinite(scaled).all():
        raise AdapterCorrupt(f"lora_B of {path} times its scaling overflows float32", got=f"scaling {scaling:g}")
    return scaled
