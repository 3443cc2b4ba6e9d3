"""Choosing tokens from logits. Rows are computed together and never from each other: a request's tokens do not depend
on its neighbours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graftlm.engine.grammar import Grammar
from graftlm.engine.request import Request
from graftlm.engine.sampling_params import SamplingParams

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
    vocab_sizes = [len(own) for own in own_vocabularies(logits)]
    rated = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    reported = {}
    if rated:
        reported = dict(zip(rated, own_vocabularies(torch.log_softmax(logits[rated], dim=-1)), strict=True))
    for row, request in enumerate(requests):
        _adjust(logits[row], request)
        if request.grammar is not None:
            broken[row] |= not _constrain(logits[row], request.grammar)
    chosen = _largest(logits)
    drawn = [row for row, request in enumerate(requests) if not (request.params.greedy or broken[row])]
    if drawn:
        tokens = _draw(logits[drawn], [vocab_sizes[row] for row in drawn], [requests[row] for row in drawn])
        for row, token_id in zip(drawn, tokens, strict=True):
            chosen[row] = token_id
    return [
        None
        if broken[row]
        else SampledToken(
            token_id=chosen[row],
            logprobs=None
            if request.params.logprobs is None
            else row_logprobs(reported[row], chosen[row], request.params.logprobs),
        )
        for row, request in enumerate(requests)
    ]


def _largest(logits: Tensor) -> list[int]:
    """Where each row, [N, V], is largest; of equals the first. On the CPU by numpy, ten times as fast as torch."""
    return (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()


def own_vocabularies(logits: Tensor) -> list[Tensor]:
    """Each row of logits or log-probabilities, [N, V], without the tokens at its end that only other rows have: which
    of equally good tokens `topk` takes depends on how many there are."""
    is_longer = logits[:, -1].isneginf().tolist()
    return [_cut(row) if longer else row for row, longer in zip(logits, is_longer, strict=True)]


def _cut(row: Tensor) -> Tensor:
    num_others = int(row.flip(0).isneginf().logical_not().int().argmax())
    return row[: len(row) - num_others]


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


def _draw(logits: Tensor, vocab_sizes: Sequence[int], requests: Sequence[Request]) -> list[int]:
    """A random token of each row, [N, V]: its cumulative distribution inverted at the request's own random number.

    vocab_sizes: how many tokens each row has, apart from those that only others have.
    """
    # What float32 cannot tell from 0 or infinity would make NaN of the best token or of those that are ruled out.
    floats = torch.finfo(logits.dtype)
    temperatures = torch.tensor(
        [min(max(request.params.temperature, floats.tiny), floats.max) for request in requests], device=logits.device
    )
    probabilities = ((logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]).softmax(dim=-1)
    uniforms = probabilities.new_tensor([_uniform(request) for request in requests], dtype=torch.float64)
    # How many best tokens are looked for, and among how many, may decide their order where they are alike: rows that
    # are computed together are those that do both alike, whoever else is there.
    groups: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (vocab_size, request) in enumerate(zip(vocab_sizes, requests, strict=True)):
        groups[vocab_size][_num_candidates(request.params, vocab_size)].append(row)
    tokens: dict[int, int] = {}
    for vocab_size, by_count in groups.items():
        tokens |= _draw_alike(probabilities[:, :vocab_size], uniforms, by_count, requests)
    return [tokens[row] for row in range(len(requests))]


def _draw_alike(
    probabilities: Tensor, uniforms: Tensor, groups: dict[int, list[int]], requests: Sequence[Request]
) -> dict[int, int]:
    """The tokens of the rows that have one vocabulary. groups: rows by the number of their candidates."""
    vocab_size = probabilities.shape[-1]
    tokens: dict[int, int] = {}
    unsorted = groups.pop(0, [])
    if unsorted:
        tokens |= zip(unsorted, _invert(probabilities[unsorted], uniforms[unsorted]).tolist(), strict=True)
    # The largest last: what the others leave undone is added to it.
    for count in sorted({*groups, vocab_size}):
        if not (rows := groups[count]):
            continue
        params = [requests[row].params for row in rows]
        best, ids = probabilities[rows].topk(count)
        places = _invert(_kept(best, params), uniforms[rows])
        chosen = ids.gather(1, places[:, None])[:, 0].tolist()
        covers = (_totals(best)[:, 0] > best.new_tensor([each.top_p for each in params])).tolist()
        for row, each, token_id, covered in zip(rows, params, chosen, covers, strict=True):
            if covered or count == vocab_size or each.top_k == count:
                tokens[row] = token_id
            else:
                groups[vocab_size].append(row)
    return tokens


def _totals(rows: Tensor) -> Tensor:
    """Their sums, [N, 1], added up in one order: `sum` may split a row that is alone among threads."""
    return rows.cumsum(dim=-1)[:, -1:]


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """How many best tokens a row is looked at with: all that top_k leaves, as many as top_p mostly keeps, or every one
    in their order; 0 for all of them as they stand."""
    if 0 < params.top_k < vocab_size:
        return params.top_k
    if params.top_p < 1.0:
        return min(_TOP_CANDIDATES, vocab_size)
    return vocab_size if params.min_p > 0.0 else 0


def _kept(best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities of each row's best tokens, [N, K] and best first, with nought for those that are not kept."""
    count = best.shape[-1]
    is_top_k = torch.tensor([each.top_k == count for each in params], device=best.device)
    top_p = best.new_tensor([each.top_p for each in params])[:, None]
    min_p = best.new_tensor([each.min_p for each in params])[:, None]
    kept = torch.where(is_top_k[:, None], best / _totals(best), best)
    before = kept.cumsum(dim=-1) - kept
    kept = kept.masked_fill((top_p < 1.0) & (before >= top_p), 0.0)
    return kept.masked_fill(kept < min_p * kept[:, :1], 0.0)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Of each row, [N, K], the first place whose cumulative share exceeds its uniform number; places of probability 0
    are never taken. uniforms: [N] float64."""
    cumulative = probabilities.double().cumsum(dim=-1)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    order = torch.arange(probabilities.shape[-1], device=probabilities.device)
    last = torch.where(probabilities > 0, order, -1).amax(dim=-1)
    return torch.minimum(places, last)


def _uniform(request: Request) -> float:
    """The request's random number for its next token: a pure function of seed, answer index and position, so that it
    survives preemption and does not depend on what else is sampled."""
    key = np.array([request.seed % 2**64, request.index], dtype=np.uint64)
    counter = len(request.output_token_ids)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
