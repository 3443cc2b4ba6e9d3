"""Several adapters on one request: the weighted sum of their low-rank updates, as PEFT adds several active adapters.

Written `legal:0.7+terse:0.3`; a name without a weight counts once. Adapter names hold neither `:` nor `+`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from graftlm.adapters.adapter import Adapter, AdapterWeights
from graftlm.errors import AdapterUnsupported, InvalidRequest
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.patch import HeadPatch, LinearPatch, ModelPatch

AdapterChoice = str | Mapping[str, float]


def is_weighted(model: str) -> bool:
    return "+" in model or ":" in model


def parse_weighted(model: str) -> dict[str, float]:
    """Weights by name.

    Raises:
        InvalidRequest: a weight is not a finite number, or a name stands twice.
    """
    weights: dict[str, float] = {}
    for term in model.split("+"):
        name, _, text = term.partition(":")
        try:
            weight = float(text) if text else 1.0
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or name in weights:
            raise InvalidRequest(
                "this is not a weighted sum of adapters",
                param="model",
                got=repr(model)[:200],
                allowed="name:weight+name:weight, each name once, weights finite",
            )
        weights[name] = weight
    return weights


def choice_name(choice: AdapterChoice) -> str:
    """One string for what a caller chose: a name, or weights by name.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(choice, str):
        return choice
    valid = isinstance(choice, Mapping) and choice
    if not valid or not all(
        isinstance(name, str) and isinstance(weight, int | float) and not isinstance(weight, bool)
        for name, weight in choice.items()
    ):
        raise InvalidRequest(
            "this is not a choice of adapters",
            param="adapter",
            got=repr(choice)[:200],
            allowed="a name, or {name: weight}",
        )
    return "+".join(f"{name}:{float(weight)!r}" for name, weight in choice.items())


def combine(model: str, parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """The adapter that does what all parts do together, each times its weight.

    Raises:
        AdapterUnsupported: a part does more than add low-rank updates, so that a sum has no meaning.
    """
    for adapter, _ in parts:
        if not adapter.is_low_rank:
            raise AdapterUnsupported(
                f"adapter {adapter.name} cannot be part of a weighted sum: it does more than add low-rank updates",
                got=adapter.method,
                do="use it alone",
            )
    digest = hashlib.sha256()
    for adapter, weight in parts:
        digest.update(f"{adapter.digest}:{weight!r};".encode())
    return Adapter(
        name=model,
        digest=digest.hexdigest(),
        method="weighted sum",
        modules=tuple(module for adapter, _ in parts for module in adapter.modules),
        source=None,
        # Ranks stand side by side, so a sum is as large as its parts together.
        num_bytes=sum(adapter.float32_bytes for adapter, _ in parts),
        float32_bytes=sum(adapter.float32_bytes for adapter, _ in parts),
        changes_dormant=any(adapter.changes_dormant for adapter, _ in parts),
        is_low_rank=True,
        bound=sum(adapter.bound for adapter, _ in parts),
        total=sum(adapter.total for adapter, _ in parts),
        created=max(adapter.created for adapter, _ in parts),
        parts=tuple(parts),
    )


def combine_weights(parts: Sequence[tuple[AdapterWeights, float]]) -> AdapterWeights:
    """The weights of a sum, from those of its parts, all of which only add low-rank updates."""
    patches = [(weights.patch, weight) for weights, weight in parts]
    slots = dict.fromkeys(slot for patch, _ in patches for slot in patch.linears)
    linears = {
        slot: LinearPatch(low_rank=_sum([(patch.linears.get(slot), weight) for patch, weight in patches]))
        for slot in slots
    }
    head = None
    if any(patch.head is not None for patch, _ in patches):
        heads = [(patch.head.linear if patch.head else None, weight) for patch, weight in patches]
        head = HeadPatch(linear=LinearPatch(low_rank=_sum(heads)))
    patch = ModelPatch(linears=linears, head=head)
    return AdapterWeights(patch=patch, dormant_patch=patch)


def is_low_rank(weights: AdapterWeights) -> bool:
    """Whether weights only add low-rank updates, from the first token on."""
    patch = weights.patch
    linears = [*patch.linears.values(), *([patch.head.linear] if patch.head else [])]
    return (
        not patch.norms
        and patch.embedding is None
        and patch.stack is None
        and patch.prefix is None
        and weights.dormant_patch is patch
        and (patch.head is None or patch.head.rows is None)
        and not any(linear.overrides or linear.outputs for linear in linears)
    )


def _sum(parts: Sequence[tuple[LinearPatch | None, float]]) -> LoraUpdate | None:
    """Ranks side by side; the weights go into the expanding factors."""
    updates = [
        (patch.low_rank.widened(), weight)
        for patch, weight in parts
        if patch is not None and patch.low_rank is not None
    ]
    expands: list[LoraExpand] = []
    offset = 0
    for update, weight in updates:
        expands.extend(
            LoraExpand(
                matrix=expand.matrix * weight,
                out_start=expand.out_start,
                out_stop=expand.out_stop,
                rank_start=expand.rank_start + offset,
                rank_stop=expand.rank_stop + offset,
            )
            for expand in update.expands
        )
        offset += update.shrink.shape[1]
    if not updates:
        return None
    return LoraUpdate(shrink=torch.cat([update.shrink for update, _ in updates], dim=1), expands=tuple(expands))
