"""Log-probabilities of answers and prompts are those of a full forward pass in transformers (R075, R076)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from graftlm import LLM, RequestOutput, SamplingParams, TokenLogprob
from tests.engine.rig import BLOCK_BYTES, full_forward, greedy, num_preemptions, one, oracle, prompt, token_ids, watched


def exact_logprobs(model: Any, output: RequestOutput, answer: int = 0) -> Tensor:
    """Row t predicts token t + 1 of prompt and answer."""
    return full_forward(model, [*output.prompt_token_ids, *output.outputs[answer].token_ids]).log_softmax(-1)


def check(entries: tuple[TokenLogprob, ...], ids: tuple[int, ...], rows: Tensor, count: int) -> None:
    """entries[i] describes ids[i], which rows[i] predicts."""
    assert [entry.token_id for entry in entries] == list(ids)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        likelier = [int((row > row[entry.token_id] + slack).sum()) for slack in (1e-4, -1e-4)]
        assert entry.rank is not None
        assert likelier[0] < entry.rank <= likelier[1]
        assert len(entry.top) == count
        best = row.topk(count)
        assert [token_id for token_id, _, _ in entry.top] == best.indices.tolist()
        for (_, _, logprob), exact in zip(entry.top, best.values.tolist(), strict=True):
            assert logprob == pytest.approx(exact, abs=1e-4)


def check_output(model: Any, output: RequestOutput, count: int) -> None:
    prompt_len = len(output.prompt_token_ids)
    for index, answer in enumerate(output.outputs):
        rows = exact_logprobs(model, output, index)
        if answer.token_ids:
            check(answer.logprobs or (), answer.token_ids, rows[prompt_len - 1 : -1], count)
        first, *others = output.prompt_logprobs or ()
        assert first.logprob is None
        assert first.token_id == output.prompt_token_ids[0]
        check(tuple(others), output.prompt_token_ids[1:], rows[: prompt_len - 1], count)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_r076_values_are_those_of_a_full_forward_pass(llm: LLM, reference: Any, count: int) -> None:
    for length in (1, 2, 10, 17, 64, 65, 130):
        output = one(llm, prompt(length), greedy(3, logprobs=count, prompt_logprobs=count, ignore_eos=True))
        assert len(output.prompt_logprobs or ()) == length
        check_output(reference, output, count)


def test_r076_an_adapters_values_come_from_its_own_logits(llm: LLM, llama: Path, adapters: dict[str, Path]) -> None:
    params = greedy(4, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    names = [None, *adapters]
    outputs = llm.generate([prompt(20)] * 4, params, adapter=names)
    for name, output in zip(names, outputs, strict=True):
        base = oracle(llama)
        check_output(base if name is None else peft.PeftModel.from_pretrained(base, adapters[name]), output, 3)
    assert len({output.prompt_logprobs for output in outputs}) == 4


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_tokens": 7}, {"max_num_batched_tokens": 5}, {"block_size": 3}], ids=str
)
def test_r076_values_do_not_depend_on_chunks(llama: Path, reference: Any, options: dict[str, int]) -> None:
    engine = LLM(llama, kv_cache_bytes=64 * BLOCK_BYTES, **options)
    requests = [prompt(length) for length in (1, 6, 7, 8, 40, 100)]
    for output in engine.generate(requests, greedy(3, logprobs=2, prompt_logprobs=2, ignore_eos=True)):
        check_output(reference, output, 2)
    engine.shutdown()


def test_r076_values_survive_preemption(llama: Path, reference: Any) -> None:
    engine = LLM(llama, kv_cache_bytes=7 * BLOCK_BYTES, max_model_len=96, prefill_chunk_tokens=11)
    requests = [prompt(40, seed) for seed in range(6)]
    with watched(engine) as seen:
        outputs = engine.generate(requests, greedy(40, logprobs=2, prompt_logprobs=2, ignore_eos=True))
    assert num_preemptions(seen) >= 3
    for output in outputs:
        check_output(reference, output, 2)
    engine.shutdown()


def test_r075_max_tokens_zero_scores_the_prompt_and_generates_nothing(llm: LLM, reference: Any) -> None:
    for prompt_logprobs in (None, 0, 3):
        for logprobs in (None, 3):
            output = one(llm, prompt(10), greedy(0, logprobs=logprobs, prompt_logprobs=prompt_logprobs))
            (answer,) = output.outputs
            assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
            assert output.num_output_tokens == 0
            assert output.finished
            if prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                check_output(reference, output, prompt_logprobs)


def test_r075_max_tokens_zero_beside_other_requests_disturbs_nobody(llm: LLM) -> None:
    alone = token_ids(one(llm, prompt(12), greedy(8)))
    params = [greedy(0, n=2), greedy(8), greedy(0, prompt_logprobs=1)]
    outputs = llm.generate([prompt(70), prompt(12), prompt(70)], params)
    assert [answer.finish_reason for answer in outputs[0].outputs] == ["length", "length"]
    assert token_ids(outputs[1]) == alone
    assert len(outputs[2].prompt_logprobs or ()) == 70


def test_values_are_the_models_own_before_penalties_bias_and_temperature(llm: LLM, reference: Any) -> None:
    params = SamplingParams(
        max_tokens=6, temperature=0.3, seed=4, top_k=3, logit_bias={9: 4.0}, repetition_penalty=1.5,
        frequency_penalty=1.0, min_tokens=6, logprobs=4, prompt_logprobs=4,
    )  # fmt: skip
    check_output(reference, one(llm, prompt(9), params), 4)


def test_several_answers_share_the_prompts_values_and_have_their_own(llm: LLM, reference: Any) -> None:
    params = SamplingParams(max_tokens=5, seed=4, n=3, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    output = one(llm, prompt(80), params)
    assert len({answer.token_ids for answer in output.outputs}) == 3
    check_output(reference, output, 2)


def test_a_token_is_described_by_its_own_text(llm: LLM) -> None:
    output = one(llm, {"prompt_token_ids": [64, 256]}, greedy(1, prompt_logprobs=1, logit_bias={65: 100}, logprobs=0))
    assert [entry.text for entry in output.prompt_logprobs or ()] == ["a", "<s>"]
    assert [entry.text for entry in output.outputs[0].logprobs or ()] == ["b"]


def test_nothing_is_reported_unless_asked_for(llm: LLM) -> None:
    output = one(llm, prompt(4), greedy(2))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None


def test_logits_are_transformers_logits_at_every_length(llm: LLM, reference: Any) -> None:
    for length in (1, 15, 16, 17, 300, 512):
        ids = prompt(length)["prompt_token_ids"]
        got = llm.logits(ids)
        assert got.shape == (length, 259)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, full_forward(reference, ids), atol=1e-4, rtol=0)
