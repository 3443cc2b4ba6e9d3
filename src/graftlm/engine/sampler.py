"""Choosing tokens from logits. Rows are computed together and never from each other: a request's tokens do not depend
on its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graftlm.engine.grammar import Grammar
from graftlm.engine.request import Request
from graftlm.kernels import ops


@dataclass(frozen=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of one row: of the token that is there, and of the k best (ids and values, best first).

    rank: of the token that is there: one more than there are likelier tokens.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """logprobs: if they were asked for."""

    token_id: int
    logprobs: RowLogprobs | None = None


# Whatever else a request asks for, the largest logit is its token.
_GREEDY = ops.TokenDraw(seed=0, answer=0, position=0, temperature=0.0, top_p=1.0, min_p=0.0, top_k=0)


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken | None]:
    """One token for each row; None where the logits are not numbers (an adapter that overflows, say), or none may come.

    Order: logit_bias, repetition penalty, presence and frequency penalties, min_tokens, grammar, then greedy or
    temperature, top_k, top_p, min_p. Log-probabilities are of the model's own distribution, before all of these.

    Args:
        logits: [N, V]; changed in place if they are float32.
        requests: the N requests the rows belong to.
    """
    rated = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    own = logits[rated] if rated else logits
    adjusted = [row for row, request in enumerate(requests) if _is_adjusted(request)]
    if adjusted:
        logits = ops.widened(logits)
        for row in adjusted:
            _adjust(logits[row], requests[row])
    chosen = ops.draw_tokens(logits, [_draw_of(request) for request in requests])
    reported: dict[int, RowLogprobs] = {}
    if rated:
        counts = [requests[row].params.logprobs or 0 for row in rated]
        # Whatever was not chosen is not reported.
        reported = dict(zip(rated, rate(own, [max(chosen[row], 0) for row in rated], counts), strict=True))
    return [None if token_id < 0 else SampledToken(token_id, reported.get(row)) for row, token_id in enumerate(chosen)]


def rate(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[RowLogprobs]:
    """What is reported of rows.

    Args:
        logits: [N, V]. token_ids: the token that is there in each. counts: how many of the best.
    """
    found = ops.token_logprobs(logits, torch.tensor(token_ids, device=logits.device), max(counts))
    lists = [part.tolist() for part in found]
    return [
        RowLogprobs(logprob=logprob, rank=rank, top_ids=tuple(ids[:count]), top_logprobs=tuple(logprobs[:count]))
        for logprob, rank, ids, logprobs, count in zip(*lists, counts, strict=True)
    ]


def _draw_of(request: Request) -> ops.TokenDraw:
    """The random number is a pure function of seed, answer index and position, so that it survives preemption and does
    not depend on what else is sampled."""
    params = request.params
    if params.greedy:
        return _GREEDY
    return ops.TokenDraw(
        seed=request.seed % 2**64,
        answer=request.index,
        position=len(request.output_token_ids),
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
    )


def _is_adjusted(request: Request) -> bool:
    params = request.params
    return request.grammar is not None or params.changes_logits or len(request.output_token_ids) < params.min_tokens


def _adjust(logits: Tensor, request: Request) -> None:
    """Bias, penalties and grammar on one row, [V], in place. One that is not numbers stays as it is."""
    if logits[0].isnan():
        return
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.sent_token_ids, *request.output_token_ids}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        # Finite, whatever the penalty: the difference of two infinities would be NaN for the whole row.
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty).nan_to_num_()
    if (params.presence_penalty or params.frequency_penalty) and request.output_token_ids:
        counts = Counter(request.output_token_ids)
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    if len(request.output_token_ids) < params.min_tokens and request.stop_token_ids:
        ids = torch.tensor(sorted(request.stop_token_ids), device=logits.device)
        logits[ids] = -torch.inf
        if logits.max() == -torch.inf:
            # There are no others.
            logits[ids] = 0.0
    if request.grammar is not None:
        _constrain(logits, request.grammar)


def _constrain(logits: Tensor, grammar: Grammar) -> None:
    """Leave one row, [V], the tokens that may come next, in place."""
    bits = np.unpackbits(np.frombuffer(grammar.bitmask(), dtype=np.uint8), count=len(logits), bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits.masked_fill_(forbidden, -torch.inf)
    if logits.max() == -torch.inf:
        # Only end tokens may come, and min_tokens has ruled them out.
        logits.masked_fill_(~forbidden, 0.0)
