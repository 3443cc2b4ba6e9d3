"""Mixtures of experts: feed-forward layers of which each token takes a few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.collective import Collective
from graftlm.layers.linear import Linear
from graftlm.layers.mlp import FeedForward
from graftlm.layers.norm import Norm, normed
from graftlm.layers.patch import Slot
from graftlm.layers.segments import Segment, Segments


@dataclass(frozen=True, kw_only=True)
class Expert:
    """slots: of its linear layers."""

    mlp: FeedForward
    slots: tuple[Slot, ...]


class GatedSharedExpert:
    """sigmoid(gate(x)) * mlp(x). gate: one output column."""

    def __init__(self, *, gate: Linear, mlp: FeedForward) -> None:
        self._gate = gate
        self._mlp = mlp

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        return ops.elementwise(torch.sigmoid, self._gate(x, segments)) * self._mlp(x, segments)


@dataclass(frozen=True, kw_only=True)
class RouterScale:
    """What a router's input is multiplied by: a vector [E], then a number. Two roundings, as in transformers."""

    vector: Tensor
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.vector * self.factor


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses each token's experts: the most probable by linear(scale(norm(x))).

    expert_scale: [number of experts], what the weight of each is multiplied by once it is chosen.
    Source: `kernels.ops.route`; norm and scales: transformers' Gemma4TextRouter.
    """

    linear: Linear
    experts_per_token: int
    renormalise: bool
    norm: Norm | None = None
    scale: RouterScale | None = None
    expert_scale: Tensor | None = None

    def __call__(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """x: [T, E] -> weights, float32, and the experts' indices, [T, experts per token] each."""
        x = normed(x, self.norm, segments)
        if self.scale is not None:
            x = self.scale(x)
        weights, chosen = ops.route(self.linear(x, segments), self.experts_per_token, renormalise=self.renormalise)
        return (weights if self.expert_scale is None else weights * self.expert_scale[chosen]), chosen


class MixtureOfExperts:
    """The weighted sum of each token's experts, plus a shared one.

    norm: of what the experts read, but not the router.
    An expert sees its tokens in one go and in batch order, so that the tokens of an adapter stand together there too.
    Experts that no token goes to are not touched.

    experts: by number; those of other ranks are missing. collective: these ranks, whose experts' results add up.
    """

    def __init__(
        self,
        *,
        router: Router,
        norm: Norm | None,
        experts: Mapping[int, Expert],
        shared: FeedForward | None,
        collective: Collective | None = None,
    ) -> None:
        self._router = router
        self._norm = norm
        self._experts = dict(experts)
        self._shared = shared
        self._collective = collective

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, E] -> [T, E]."""
        weights, chosen = self._router(x, segments)
        x = normed(x, self._norm, segments)
        out = torch.zeros_like(x)
        for index, rows, row_weights in _by_expert(chosen, weights):
            expert = self._experts.get(index)
            if expert is None:
                continue
            result = expert.mlp(x.index_select(0, rows), _segments_among(rows, segments, expert.slots))
            out.index_add_(0, rows, (result * row_weights[:, None]).to(out.dtype))
        if self._collective is not None:
            out = self._collective.all_reduce(out)
        return out if self._shared is None else out + self._shared(x, segments)


@dataclass(frozen=True, kw_only=True)
class DenseBesideExperts:
    """post_dense(dense(pre_dense(x))) + post_experts(experts(x)).

    Source: transformers' Gemma4TextDecoderLayer.
    """

    dense: FeedForward
    experts: FeedForward
    pre_dense_norm: Norm | None
    post_dense_norm: Norm | None
    post_experts_norm: Norm | None

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, E] -> [T, E]."""
        dense = self.dense(normed(x, self.pre_dense_norm, segments), segments)
        experts = self.experts(x, segments)
        return normed(dense, self.post_dense_norm, segments) + normed(experts, self.post_experts_norm, segments)


def _by_expert(chosen: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert that is chosen, the rows that chose it, ascending, and its weight in each of them.

    chosen, weights: [T, experts per token].
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    rows, row_weights = order // chosen.shape[1], weights.flatten()[order]
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        yield expert, rows[start : start + count], row_weights[start : start + count]
        start += count


def _segments_among(rows: Tensor, segments: Segments, slots: Sequence[Slot]) -> Segments:
    """The segments as they lie in x[rows], if they patch any of the slots. rows: ascending."""
    patching = [segment for segment in segments if any(slot in segment.patch.linears for slot in slots)]
    if not patching:
        return Segments()
    bounds = torch.tensor([(segment.start, segment.stop) for segment in patching], device=rows.device)
    places = torch.searchsorted(rows, bounds).tolist()
    own = (
        Segment(start=start, stop=stop, patch=segment.patch)
        for segment, (start, stop) in zip(patching, places, strict=True)
        if start < stop
    )
    return Segments(own, slots=slots)
