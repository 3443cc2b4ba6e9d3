"""Every sampling field does what it says (R065 to R068, R070, R080)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graftlm import LLM, SamplingParams
from graftlm.engine.request import Request
from graftlm.engine.sampler import sample
from tests.engine.rig import BLOCK_BYTES, VOCAB, greedy, greedy_loop, make_chain, one, prompt, token_ids

# After token 0 twelve tokens are possible; all others are e^-40 of the best.
POSSIBLE = torch.tensor([3.0, 2.6, 2.2, 2.1, 1.7, 1.2, 1.0, 0.6, 0.3, 0.0, -0.4, -0.5])
START = {"prompt_token_ids": [0]}


@pytest.fixture(scope="module")
def dice_logits() -> Tensor:
    logits = torch.full((VOCAB,), -40.0)
    logits[100:112] = POSSIBLE
    return logits


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory, dice_logits: Tensor) -> Iterator[LLM]:
    """A model with one known distribution, whatever stands before."""
    folder = make_chain(tmp_path_factory.mktemp("dice"), dice_logits.repeat(VOCAB, 1))
    engine = LLM(folder, kv_cache_bytes=1 << 20, max_model_len=64)
    yield engine
    engine.shutdown()


def throws(dice: LLM, count: int, **fields: Any) -> Counter[int]:
    """First tokens of `count` answers, 128 of each seed."""
    seeds = range(math.ceil(count / 128))
    params = [SamplingParams(max_tokens=1, n=128, seed=seed, **fields) for seed in seeds]
    outputs = dice.generate([START] * len(params), params)
    return Counter(answer.token_ids[0] for output in outputs for answer in output.outputs)


def kept_by_transformers(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities after generate's own chain of warpers."""
    chain: LogitsProcessorList = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    scores: Tensor = chain(torch.tensor([[0]]), logits[None].clone())
    return scores[0].softmax(-1)


def chi_square(counts: Counter[int], probabilities: Tensor) -> float:
    total = counts.total()
    expected = {index: float(share) * total for index, share in enumerate(probabilities) if share * total >= 1.0}
    return sum((counts[index] - wanted) ** 2 / wanted for index, wanted in expected.items())


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
def test_tokens_are_drawn_in_proportion_to_their_probability(
    dice: LLM, dice_logits: Tensor, temperature: float
) -> None:
    counts = throws(dice, 2048, temperature=temperature)
    probabilities = (dice_logits / temperature).softmax(-1)
    # 11 degrees of freedom: 45 is exceeded by a fair sampler once in 200,000 runs. The seeds are fixed.
    assert chi_square(counts, probabilities) < 45
    # The same counts refute neighbouring temperatures, so the test can fail.
    assert chi_square(counts, (dice_logits / (temperature * 1.5)).softmax(-1)) > 45


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        *itertools.product([1.0], [0, 1, 3, 12, 300], [1.0, 0.5, 0.9], [0.0, 0.3]),
        (0.5, 4, 0.7, 0.0),
        (2.0, 4, 0.7, 0.0),
        (2.0, 0, 0.8, 0.2),
        (0.7, 0, 1.0, 0.05),
        (1.0, 0, 0.01, 0.0),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_r066_top_k_top_p_and_min_p_keep_what_transformers_keeps(
    dice: LLM, dice_logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    probabilities = kept_by_transformers(dice_logits, temperature, top_k, top_p, min_p)
    counts = throws(dice, 640, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(counts) <= set(probabilities.nonzero().flatten().tolist())
    # Anything of 2 % is there among 640 but for one in 400,000.
    assert set(counts) >= set((probabilities >= 0.02).nonzero().flatten().tolist())
    assert chi_square(counts, probabilities) < 45


def test_r065_a_seed_gives_the_same_tokens_alone_and_among_neighbours(llm: LLM) -> None:
    request = prompt(12)
    params = {seed: SamplingParams(max_tokens=24, temperature=1, seed=seed, ignore_eos=True) for seed in (7, 8)}
    alone = {seed: token_ids(one(llm, request, params[seed])) for seed in params}
    assert alone[7] != alone[8]
    unseeded = SamplingParams(max_tokens=24, temperature=1, ignore_eos=True)
    for turn in range(5):
        batch = [unseeded, params[7], unseeded, params[8], unseeded, unseeded]
        requests = [prompt(5 + turn), request, prompt(40), request, prompt(2), request]
        outputs = llm.generate(requests, batch, adapter=["red", None, None, None, "blue", "green"])
        assert token_ids(outputs[1]) == alone[7]
        assert token_ids(outputs[3]) == alone[8]


def test_r065_a_seed_gives_the_same_tokens_after_a_restart_and_after_preemption(llm: LLM, llama: Path) -> None:
    requests = [prompt(30, seed) for seed in range(8)]
    params = [SamplingParams(max_tokens=40, temperature=1, seed=seed, ignore_eos=True) for seed in range(8)]
    alone = [token_ids(one(llm, request, own)) for request, own in zip(requests, params, strict=True)]
    small = LLM(llama, kv_cache_bytes=7 * BLOCK_BYTES, max_model_len=80, prefill_chunk_tokens=7)
    assert [token_ids(output) for output in small.generate(requests, params)] == alone
    small.shutdown()


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_64_bit_seed_is_taken(llm: LLM, seed: int) -> None:
    params = SamplingParams(max_tokens=4, seed=seed)
    assert token_ids(one(llm, prompt(4), params)) == token_ids(one(llm, prompt(4), params))


def test_r070_without_a_seed_answers_differ_within_a_run_and_after_a_restart(llama: Path) -> None:
    firsts = []
    for _ in range(2):
        engine = LLM(llama, kv_cache_bytes=64 * BLOCK_BYTES)
        params = SamplingParams(max_tokens=16, temperature=1, ignore_eos=True)
        answers = [token_ids(one(engine, prompt(5), params)) for _ in range(10)]
        assert len(set(answers)) == 10
        firsts.append(answers[0])
        engine.shutdown()
    assert firsts[0] != firsts[1]


def test_r082_n_answers_are_different_and_in_order(llm: LLM) -> None:
    output = one(llm, prompt(8), SamplingParams(max_tokens=12, temperature=1, seed=3, n=5, ignore_eos=True))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    assert len({answer.token_ids for answer in output.outputs}) == 5
    assert output.num_output_tokens == 60
    # The first answer of several is the one a single answer would have been.
    single = one(llm, prompt(8), SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True))
    assert single.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"temperature": 3.0},
        {"top_p": 0.2},
        {"top_k": 1},
        {"min_p": 0.9},
        {"seed": 2},
        {"repetition_penalty": 2.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {5: 100}},
        {"stop_token_ids": tuple(range(0, 256, 3))},
        {"min_tokens": 24, "stop_token_ids": tuple(range(0, 256, 3))},
        {"max_tokens": 3},
    ],
    ids=str,
)
def test_r066_every_field_changes_the_tokens(llm: LLM, changed: dict[str, Any]) -> None:
    plain = {"max_tokens": 24, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    if "min_tokens" in changed:
        plain["stop_token_ids"] = changed["stop_token_ids"]
    before = token_ids(one(llm, prompt(10), SamplingParams(**plain)))
    after = token_ids(one(llm, prompt(10), SamplingParams(**{**plain, **changed})))
    assert after != before


def test_r066_repetition_penalty_is_transformers(llm: LLM, reference: Any) -> None:
    for penalty in (0.7, 1.3, 5.0):
        request = prompt(30)
        expected = reference.generate(
            torch.tensor([request["prompt_token_ids"]]),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=258,
        )[0, 30:].tolist()
        assert list(token_ids(one(llm, request, greedy(24, repetition_penalty=penalty)))) == expected


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.7), (0.5, 0.5), (-1.0, 0.0), (0.0, -2.0)])
def test_r067_presence_and_frequency_count_the_output_only(
    llm: LLM, reference: Any, presence: float, frequency: float
) -> None:
    request = prompt(30)

    def penalise(logits: Tensor, outputs: list[int]) -> Tensor:
        for token_id, count in Counter(outputs).items():
            logits[token_id] -= presence + frequency * count
        return logits

    params = greedy(16, presence_penalty=presence, frequency_penalty=frequency, ignore_eos=True)
    expected = greedy_loop(reference, request, 16, penalise)
    assert token_ids(one(llm, request, params)) == expected
    assert token_ids(one(llm, request, greedy(16, ignore_eos=True))) != expected


def test_r067_repetition_looks_at_the_prompt_and_presence_does_not(tmp_path: Path) -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 7], table[:, 9] = 3.0, 2.5
    engine = LLM(make_chain(tmp_path, table), kv_cache_bytes=1 << 20, max_model_len=64)
    seen = {"prompt_token_ids": [7, 1]}
    assert token_ids(one(engine, seen, greedy(3))) == (7, 7, 7)
    assert token_ids(one(engine, seen, greedy(1, repetition_penalty=5.0))) == (9,)
    assert token_ids(one(engine, {"prompt_token_ids": [1]}, greedy(2, repetition_penalty=5.0))) == (7, 9)
    assert token_ids(one(engine, seen, greedy(2, presence_penalty=2.0))) == (7, 9)
    # Frequency 0.3 needs two sevens before it outweighs the gap of 0.5.
    assert token_ids(one(engine, seen, greedy(4, frequency_penalty=0.3))) == (7, 7, 9, 7)
    engine.shutdown()


def test_r080_logit_bias_moves_tokens_by_its_value(llm: LLM, reference: Any) -> None:
    request = prompt(10)
    assert token_ids(one(llm, request, greedy(6, logit_bias={5: 100}))) == (5,) * 6
    bias = {token_id: 0.3 * (token_id % 7) for token_id in range(0, 250, 5)}

    def add(logits: Tensor, outputs: list[int]) -> Tensor:
        for token_id, value in bias.items():
            logits[token_id] += value
        return logits

    got = token_ids(one(llm, request, greedy(16, logit_bias=bias, ignore_eos=True)))
    assert got == greedy_loop(reference, request, 16, add)
    banned = got[0]
    assert token_ids(one(llm, request, greedy(1, logit_bias={banned: -100})))[0] != banned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_r068_small_temperatures_are_greedy(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    # Distinct halves: every pair of logits is at least 0.5 apart, e^-50 at temperature 0.01.
    table = torch.stack([torch.randperm(VOCAB) for _ in range(VOCAB)]).float() / 2
    engine = LLM(make_chain(tmp_path, table), dtype=dtype, kv_cache_bytes=1 << 20, max_model_len=64)
    request = {"prompt_token_ids": [3]}
    wanted = token_ids(one(engine, request, greedy(24, ignore_eos=True)))
    assert len(set(wanted)) > 3
    for temperature in (0.0, 5e-324, 1e-45, 1e-8, 1e-5, 1e-4, 0.01):
        params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, seed=1)
        assert token_ids(one(engine, request, params)) == wanted
    engine.shutdown()


@pytest.mark.parametrize("temperature", [2.0, 100.0, 1e30, 1e300])
@pytest.mark.parametrize("more", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}, {"min_tokens": 4}], ids=str)
def test_r068_large_temperatures_stay_finite_and_draw_allowed_tokens(
    llm: LLM, temperature: float, more: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=1, logprobs=3, **more)
    (answer,) = one(llm, prompt(6), params).outputs
    assert all(math.isfinite(entry.logprob or math.nan) for entry in answer.logprobs or ())
    assert len(set(answer.token_ids)) > 1
    assert 257 not in answer.token_ids[: more.get("min_tokens", 0)]


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_repetition_penalties_still_draw_by_the_rest_of_the_distribution(llm: LLM, penalty: float) -> None:
    """Tokens that were seen are certain or impossible then; none of it may turn into NaN."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, repetition_penalty=penalty, ignore_eos=True)
    answer = token_ids(one(llm, prompt(3), params))
    if penalty > 1:
        # A seen token ends at 0 or at -inf: nothing is likely to come twice.
        assert len(set(answer)) > 8
    else:
        # A seen token with a positive logit is certain; which ones are positive changes with the context.
        seen = set(prompt(3)["prompt_token_ids"])
        for before, token_id in itertools.pairwise(answer):
            seen.add(before)
            assert token_id in seen


def test_fields_are_applied_in_the_documented_order(tmp_path: Path) -> None:
    """logit_bias comes before the penalties, and both before top_k."""
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 7], table[:, 9], table[:, 11] = 3.0, 2.5, -1.0
    engine = LLM(make_chain(tmp_path, table), kv_cache_bytes=1 << 20, max_model_len=64)
    request = {"prompt_token_ids": [11]}
    # Biased to +4, token 11 is divided by 2 to 2; unbiased, it would be multiplied to -2 and biased to +3.
    params = greedy(1, logit_bias={11: 5.0}, repetition_penalty=2.0)
    assert token_ids(one(engine, request, params)) == (7,)
    drawn = SamplingParams(max_tokens=1, n=50, seed=0, top_k=1, logit_bias={7: -3.0})
    assert {answer.token_ids for answer in one(engine, request, drawn).outputs} == {(9,)}
    engine.shutdown()


def test_rows_that_are_sampled_together_draw_what_each_draws_alone() -> None:
    """Flat rows, too, whose few best tokens are not enough for top_p, and rows of which many tokens are alike."""
    generator = torch.Generator().manual_seed(0)
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"top_k": 5}, {"top_k": 256}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.1},
        {"top_k": 256, "top_p": 0.5, "min_p": 0.01}, {"top_p": 0.9, "logprobs": 3}, {"temperature": 7.5, "logprobs": 0},
    ]  # fmt: skip
    requests, rows = [], []
    for index in range(60):
        params = SamplingParams(**{"temperature": 1.0, **settings[index % len(settings)]})
        requests.append(
            Request(
                request_id=str(index),
                index=0,
                prompt_token_ids=(1,),
                params=params,
                max_tokens=1,
                stop_token_ids=frozenset(),
                seed=index,
            )
        )
        row = torch.randn(2000, generator=generator) * (0.1, 1.0, 4.0)[index % 3]
        rows.append(row.round() if index % 4 == 0 else row)
    logits = torch.stack(rows)
    logits[17] = torch.nan
    alone = [sample(logits[row : row + 1].clone(), [request])[0] for row, request in enumerate(requests)]
    assert sample(logits.clone(), requests) == alone
    # Beside a row that has more tokens, which the others lack.
    longer = pad(logits, (0, 20_000), value=-torch.inf)
    longer[-1] = torch.randn(22_000, generator=generator)
    assert sample(longer, requests)[:-1] == alone[:-1]
    assert alone[17] is None
    assert len({token.token_id for token in alone if token is not None}) > 30
