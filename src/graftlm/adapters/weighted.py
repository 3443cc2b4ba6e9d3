"""Several adapters on one request: the weighted sum of their low-rank updates, as PEFT adds several active adapters.

Written `legal:0.7+terse:0.3`; a name without a weight counts once. Adapter names hold neither `:` nor `+`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from graftlm.adapters.adapter import Adapter
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
        _check_summable(adapter)
    digest = hashlib.sha256()
    for adapter, weight in parts:
        digest.update(f"{adapter.digest}:{weight!r};".encode())
    slots = dict.fromkeys(slot for adapter, _ in parts for slot in adapter.patch.linears)
    linears = {
        slot: LinearPatch(low_rank=_sum([(adapter.patch.linears.get(slot), weight) for adapter, weight in parts]))
        for slot in slots
    }
    head = None
    if any(adapter.patch.head is not None for adapter, _ in parts):
        heads = [(adapter.patch.head.linear if adapter.patch.head else None, weight) for adapter, weight in parts]
        head = HeadPatch(linear=LinearPatch(low_rank=_sum(heads)))
    patch = ModelPatch(linears=linears, head=head)
    return Adapter(
        name=model,
        digest=digest.hexdigest(),
        method="weighted sum",
        modules=tuple(module for adapter, _ in parts for module in adapter.modules),
        source=None,
        patch=patch,
        dormant_patch=patch,
        bound=sum(adapter.bound for adapter, _ in parts),
        total=sum(adapter.total for adapter, _ in parts),
        created=max(adapter.created for adapter, _ in parts),
        parts=tuple(adapter for adapter, _ in parts),
    )


def _check_summable(adapter: Adapter) -> None:
    patch = adapter.patch
    linears = [*patch.linears.values(), *([patch.head.linear] if patch.head else [])]
    plain = (
        not patch.norms
        and patch.embedding is None
        and adapter.vocab_size is None
        and not adapter.virtual_token_ids
        and adapter.dormant_patch is patch
        and (patch.head is None or patch.head.rows is None)
        and not any(linear.overrides or linear.outputs for linear in linears)
    )
    if not plain:
        raise AdapterUnsupported(
            f"adapter {adapter.name} cannot be part of a weighted sum: it does more than add low-rank updates",
            got=adapter.method,
            do="use it alone",
        )


def _sum(parts: Sequence[tuple[LinearPatch | None, float]]) -> LoraUpdate | None:
    """Ranks side by side; the weights go into the expanding factors."""
    updates = [(patch.low_rank, weight) for patch, weight in parts if patch is not None and patch.low_rank is not None]
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
