"""Choosing tokens from logits. Every row is computed on its own: a request's tokens never depend on its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graftlm.engine.grammar import Grammar
from graftlm.engine.request import Request

# Nucleus sampling looks at this many best tokens before it sorts the whole vocabulary.
_TOP_CANDIDATES = 256


@dataclass(frozen=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of one row: of the token that is there, and of the k best (ids and values, best first).

    rank: of the token that is there: one more than there are likelier tokens.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    token_id: int
    logprobs: RowLogprobs | None


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken | None]:
    """One token for each row; None where the logits are not numbers (an adapter that overflows, say).

    Order: logit_bias, repetition penalty, presence and frequency penalties, min_tokens, grammar, then greedy or
    temperature, top_k, top_p, min_p. Log-probabilities are of the model's own distribution, before all of these.

    Args:
        logits: [N, V] float32; changed in place.
        requests: the N requests the rows belong to.
    """
    # A hidden state with a NaN or infinity makes the whole row NaN: one column tells.
    broken = logits[:, 0].isnan().tolist()
    reported = {
        row: torch.log_softmax(logits[row], dim=-1)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    }
    for row, request in enumerate(requests):
        _adjust(logits[row], request)
        if request.grammar is not None:
            broken[row] |= not _constrain(logits[row], request.grammar)
    best = logits.argmax(dim=-1).tolist()
    tokens: list[SampledToken | None] = []
    for row, request in enumerate(requests):
        if broken[row]:
            tokens.append(None)
            continue
        token_id = best[row] if request.params.greedy else _draw(logits[row], request)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = row_logprobs(reported[row], token_id, request.params.logprobs)
        tokens.append(SampledToken(token_id=token_id, logprobs=logprobs))
    return tokens


def row_logprobs(logprobs: Tensor, token_id: int, count: int) -> RowLogprobs:
    """What is reported of one row. logprobs: [V]."""
    values, ids = logprobs.topk(count)
    logprob = logprobs[token_id]
    return RowLogprobs(
        logprob=float(logprob),
        rank=1 + int((logprobs > logprob).sum()),
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(values.tolist()),
    )


def _adjust(logits: Tensor, request: Request) -> None:
    """Bias and penalties on one row, [V], in place."""
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
        logits[torch.tensor(sorted(request.stop_token_ids), device=logits.device)] = -torch.inf


def _constrain(logits: Tensor, grammar: Grammar) -> bool:
    """Leave one row, [V], the tokens that may come next, in place; False when there are none."""
    bits = np.unpackbits(np.frombuffer(grammar.bitmask(), dtype=np.uint8), count=len(logits), bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits.masked_fill_(forbidden, -torch.inf)
    if logits.max() == -torch.inf:
        # Only end tokens may come, and min_tokens has ruled them out.
        logits.masked_fill_(~forbidden, 0.0)
    return not bool(forbidden.all())


def _draw(logits: Tensor, request: Request) -> int:
    """A random token of one row, [V], by inverting the cumulative distribution at the request's own random number."""
    params = request.params
    scaled = (logits - logits.max()) / params.temperature
    uniform = _uniform(request)
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return _invert(scaled.softmax(dim=-1), uniform)
    probabilities, ids = _candidates(scaled, params.top_k, params.top_p)
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities[0], 0.0)
    return int(ids[_invert(probabilities, uniform)])


def _candidates(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and ids, best first, of at least all tokens that top_k and top_p keep."""
    probabilities = scaled.softmax(dim=-1)
    vocab_size = probabilities.shape[-1]
    if 0 < top_k < vocab_size:
        values, ids = probabilities.topk(top_k)
        return values / values.sum(), ids
    values, ids = probabilities.topk(min(_TOP_CANDIDATES, vocab_size))
    if top_p < 1.0 and float(values.sum()) > top_p:
        return values, ids
    values, ids = probabilities.sort(descending=True)
    return values, ids


def _invert(probabilities: Tensor, uniform: float) -> int:
    """First index whose cumulative share exceeds `uniform`; indices of probability 0 are never taken."""
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return min(index, int(probabilities.nonzero()[-1]))


def _uniform(request: Request) -> float:
    """The request's random number for its next token: a pure function of seed, answer index and position, so that it
    survives preemption and does not depend on what else is sampled."""
    key = np.array([request.seed % 2**64, request.index], dtype=np.uint64)
    counter = len(request.output_token_ids)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
