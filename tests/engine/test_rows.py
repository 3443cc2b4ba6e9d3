"""A request's tokens do not depend on what else the engine is doing (R040, R090, R091, R092)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from graftlm import LLM, AsyncLLM
from tests.engine.rig import (
    BLOCK_BYTES,
    full_forward,
    greedy,
    num_preemptions,
    one,
    oracle,
    prompt,
    token_ids,
    watched,
)
from tests.tiny import ALL_PROJECTIONS, make_adapter

NAMES = [None, "red", "green", "blue"]
# 32 requests: every adapter and the base, prompts of 1 to 64 tokens around the block size.
LENGTHS = [1, 2, 7, 15, 16, 17, 33, 64]
REQUESTS: list[tuple[dict[str, list[int]], str | None]] = [
    (prompt(length, seed), name) for seed, name in enumerate(NAMES) for length in LENGTHS
]
PROMPTS = [request for request, _ in REQUESTS]
ADAPTERS = [name for _, name in REQUESTS]
PARAMS = greedy(24, ignore_eos=True)

Solo = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def solo(llm: LLM) -> Solo:
    """Each request on an idle engine."""
    return [token_ids(one(llm, request, PARAMS, name)) for request, name in REQUESTS]


def together(llm: LLM) -> Solo:
    return [token_ids(output) for output in llm.generate(PROMPTS, PARAMS, adapter=ADAPTERS)]


def test_greedy_tokens_are_those_of_transformers_generate(llm: LLM, reference: Any) -> None:
    for length in [1, 2, 15, 16, 17, 100, 255, 256, 257]:
        request = prompt(length, seed=5)
        expected = reference.generate(
            torch.tensor([request["prompt_token_ids"]]), max_new_tokens=24, do_sample=False, pad_token_id=258
        )[0, length:].tolist()
        assert list(token_ids(one(llm, request, greedy(24)))) == expected


def test_r017_an_adapters_greedy_tokens_are_pefts_and_not_the_bases(
    llm: LLM, llama: Path, adapters: dict[str, Path]
) -> None:
    request = prompt(20)
    base = token_ids(one(llm, request, PARAMS))
    for name, folder in adapters.items():
        model = peft.PeftModel.from_pretrained(oracle(llama), folder)
        expected = model.generate(
            torch.tensor([request["prompt_token_ids"]]), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )[0, 20:].tolist()
        got = token_ids(one(llm, request, greedy(24, min_tokens=24), name))
        assert list(got) == expected
        assert got[:8] != base[:8]


def test_r091_a_batch_of_32_gives_each_request_its_solo_tokens(llm: LLM, solo: Solo) -> None:
    for _ in range(3):
        assert together(llm) == solo


def test_r091_the_order_in_the_batch_does_not_matter(llm: LLM, solo: Solo) -> None:
    outputs = llm.generate(PROMPTS[::-1], PARAMS, adapter=ADAPTERS[::-1])
    assert [token_ids(output) for output in outputs] == solo[::-1]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 7},
        {"prefill_chunk_tokens": 1},
        {"max_num_batched_tokens": 9},
        {"max_num_seqs": 1},
        {"block_size": 1, "kv_cache_bytes": 96 * 32 * BLOCK_BYTES // 16},
        {"block_size": 64},
    ],
    ids=str,
)
def test_r040_chunks_blocks_and_budgets_do_not_change_tokens(
    llama: Path, adapters: dict[str, Path], solo: Solo, options: dict[str, int]
) -> None:
    engine = LLM(llama, adapters=adapters, **{"kv_cache_bytes": 256 * BLOCK_BYTES, **options})
    with watched(engine) as seen:
        assert together(engine) == solo
    if "prefill_chunk_tokens" in options:
        assert max(len(sequence.token_ids) for sequence in seen) == options["prefill_chunk_tokens"]
    engine.shutdown()


@pytest.mark.parametrize("chunk", [None, 7])
def test_preempted_requests_go_on_with_the_same_tokens(
    llama: Path, adapters: dict[str, Path], solo: Solo, chunk: int | None
) -> None:
    engine = LLM(llama, adapters=adapters, kv_cache_bytes=9 * BLOCK_BYTES, max_model_len=96, prefill_chunk_tokens=chunk)
    with watched(engine) as seen:
        assert together(engine) == solo
    assert num_preemptions(seen) > 10
    engine.shutdown()


def test_a_request_that_was_aborted_gives_the_same_tokens_when_sent_again(
    llama: Path, adapters: dict[str, Path], solo: Solo
) -> None:
    async def scenario() -> Solo:
        engine = AsyncLLM(llama, adapters=adapters, kv_cache_bytes=64 * BLOCK_BYTES, prefill_chunk_tokens=7)

        async def abort_then_resend(index: int) -> tuple[int, ...]:
            request, name = REQUESTS[index]
            stream = await engine.add_request(request, PARAMS, adapter=name)
            for _ in range(index % 5):
                await anext(stream)
            stream.abort()
            return token_ids(await engine.generate(request, PARAMS, adapter=name))

        tokens = await asyncio.gather(*(abort_then_resend(index) for index in range(len(REQUESTS))))
        await engine.shutdown()
        return tokens

    assert asyncio.run(scenario()) == solo


@pytest.mark.parametrize(("num_base", "num_adapter"), [(1, 1), (1, 7), (7, 1)])
def test_r092_base_rows_beside_adapter_rows_are_the_bases(
    llm: LLM, solo: Solo, reference: Any, num_base: int, num_adapter: int
) -> None:
    requests = [prompt(16 + index) for index in range(num_base + num_adapter)]
    names = [None] * num_base + ["green"] * num_adapter
    params = greedy(4, logprobs=5, ignore_eos=True)
    outputs = llm.generate(requests[::-1], params, adapter=names[::-1])[::-1]
    for request, name, output in zip(requests, names, outputs, strict=True):
        (alone,) = llm.generate([request], params, adapter=name)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        if name is None:
            ids = [*request["prompt_token_ids"], *token_ids(output)]
            exact = full_forward(reference, ids).log_softmax(-1)
            for position, entry in enumerate(output.outputs[0].logprobs or (), len(request["prompt_token_ids"]) - 1):
                assert entry.logprob == pytest.approx(float(exact[position, entry.token_id]), abs=1e-5)


def test_r090_two_adapters_on_one_prompt_never_answer_for_each_other(llm: LLM) -> None:
    request = prompt(30)
    alone = {name: token_ids(one(llm, request, PARAMS, name)) for name in ("red", "blue")}
    assert alone["red"] != alone["blue"]
    for turn in range(10):
        names = ["red", "blue"][:: 1 if turn % 2 else -1]
        for name, output in zip(names, llm.generate([request] * 2, PARAMS, adapter=names), strict=True):
            assert token_ids(output) == alone[name]
            assert output.adapter == name
        assert token_ids(one(llm, request, PARAMS, names[0])) == alone[names[0]]


def test_r058_base_logits_keep_their_bits_through_an_adapters_life(llama: Path, adapters: dict[str, Path]) -> None:
    engine = LLM(llama, kv_cache_bytes=64 * BLOCK_BYTES)
    requests = [prompt(length)["prompt_token_ids"] for length in (1, 5, 16, 40, 90)]
    before = [engine.logits(request) for request in requests]
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
        engine.generate([prompt(9)] * 4, greedy(8), adapter=[name, None, name, None])
        assert not torch.equal(engine.logits(requests[2], adapter=name), before[2])
        assert all(torch.equal(engine.logits(request), old) for request, old in zip(requests, before, strict=True))
    for name in adapters:
        engine.unload_adapter(name)
        assert all(torch.equal(engine.logits(request), old) for request, old in zip(requests, before, strict=True))
    engine.shutdown()


def test_an_adapter_that_overflows_spoils_its_own_rows_only(llama: Path, tmp_path: Path) -> None:
    """Its keys and values are NaN, and the next request gets the same blocks."""
    broken = make_adapter(llama, tmp_path / "broken", seed=9, scale=1e30, target_modules=ALL_PROJECTIONS)
    engine = LLM(llama, adapters={"broken": broken}, kv_cache_bytes=16 * BLOCK_BYTES, max_model_len=64, max_num_seqs=4)
    requests = [prompt(length) for length in (3, 20, 33)]
    before = [token_ids(one(engine, request, PARAMS)) for request in requests]
    assert not torch.isfinite(engine.logits(requests[0]["prompt_token_ids"], adapter="broken")).all()
    engine.generate([prompt(60)] * 4, greedy(4), adapter="broken")
    assert [token_ids(one(engine, request, PARAMS)) for request in requests] == before
    # Beside one another as well: rows of different lengths are attended in one call.
    outputs = engine.generate([*requests, prompt(60)], greedy(4, ignore_eos=True), adapter=[None] * 3 + ["broken"])
    assert [token_ids(output)[:4] for output in outputs[:3]] == [tokens[:4] for tokens in before]
    engine.shutdown()
