"""Choosing tokens from logits, and their log-probabilities, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class TokenDraw(NamedTuple):
    """How one token is chosen.

    seed, answer, position: its random number is a function of these three alone, each below 2**64.
    temperature: what logits are divided by; 0 takes the largest.
    top_p, min_p: as in `SamplingParams`. top_k: 0 for all.
    """

    seed: int
    answer: int
    position: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int

    @property
    def uniform(self) -> float:
        """The random number, in [0, 1)."""
        key = np.array([self.seed, self.answer], dtype=np.uint64)
        return float(np.random.Generator(np.random.Philox(key=key, counter=self.position)).random())


class TokenLogprobs(NamedTuple):
    """Of N tokens, and of the best of their rows, best first.

    logprobs: [N] float32. ranks: [N] int64, one more than there are larger logits.
    best_ids: [N, count] int64. best_logprobs: [N, count] float32.
    """

    logprobs: Tensor
    ranks: Tensor
    best_ids: Tensor
    best_logprobs: Tensor


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """`ops.draw_tokens`."""
    return [_draw(row, draw) for row, draw in zip(logits.double(), draws, strict=True)]


def _draw(row: Tensor, draw: TokenDraw) -> int:
    if row[0].isnan():
        return -1
    row = row.masked_fill(row.isnan(), -torch.inf)
    best, first = row.max(dim=0)
    if best == -torch.inf:
        return -1
    if draw.temperature == 0:
        return int(first)
    order = None
    if draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0:
        row, order = row.sort(descending=True, stable=True)
        row = row[: draw.top_k or None]
    weights = torch.where(row == best, 1.0, ((row - best) / draw.temperature).exp())
    if order is not None:
        before = weights.cumsum(0) - weights
        dropped = (before >= draw.top_p * weights.sum()) & (draw.top_p < 1)
        weights = weights.masked_fill(dropped | (weights < draw.min_p), 0.0)
    # The cumulative distribution is inverted; what has no weight is never taken.
    cumulative = weights.cumsum(0)
    place = torch.searchsorted(cumulative, cumulative[-1] * draw.uniform, right=True)
    place = torch.minimum(place, weights.nonzero()[-1, 0])
    return int(place if order is None else order[place])


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> TokenLogprobs:
    """`ops.token_logprobs`."""
    rows = [_rate(row, token_id, count) for row, token_id in zip(logits, token_ids, strict=True)]
    return TokenLogprobs(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def _rate(row: Tensor, token_id: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = row.double().log_softmax(dim=0)
    own = logprobs[token_id]
    # Of equals at the end `topk` takes any.
    worst = logprobs.topk(max(count, 1)).values[-1]
    ids = (~(logprobs < worst)).nonzero()[:, 0]
    best, order = logprobs[ids].sort(descending=True, stable=True)
    return own.float(), 1 + (logprobs > own).sum(), ids[order][:count], best[:count].float()
