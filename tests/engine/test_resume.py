"""Answers that another engine has begun, and that are gone on with from their tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from graftlm import AsyncLLM, RequestOutput, SamplingParams
from graftlm.engine.structured_output import StructuredOutput
from tests.engine.rig import prompt

PROMPT = prompt(20)
SAMPLED = SamplingParams(max_tokens=12, seed=7, n=3, logprobs=1, repetition_penalty=1.2, ignore_eos=True)


async def answer(llm: AsyncLLM, params: SamplingParams, resume: dict[int, tuple[int, ...]] | None) -> RequestOutput:
    return await (await llm.add_request(PROMPT, params, resume=resume)).collect()


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        SamplingParams(max_tokens=24, seed=2, n=2, structured=StructuredOutput(regex="[a-f]{20}")),
        SamplingParams(max_tokens=40, seed=1, stop=["zz", "\n"], min_tokens=4, ignore_eos=True),
    ],
)
def test_an_answer_goes_on_from_any_of_its_tokens(llama: Path, params: SamplingParams) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(llama, deterministic=True)
        whole = await answer(llm, params, None)
        expected = whole.outputs[-1]
        index, length = expected.index, len(expected.token_ids)
        assert length > 4
        for known in (0, 1, length // 2, length - 1):
            rest = await answer(llm, params, {index: expected.token_ids[:known]})
            [resumed] = rest.outputs
            assert resumed.index == index
            assert resumed.token_ids == expected.token_ids[known:]
            assert expected.text.endswith(resumed.text)
            assert (resumed.finish_reason, resumed.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert resumed.logprobs == (None if expected.logprobs is None else expected.logprobs[known:])
        await llm.shutdown()

    asyncio.run(scenario())


def test_the_texts_before_and_after_join(llama: Path) -> None:
    """Also where a character of several bytes is cut in two."""

    async def scenario() -> None:
        llm = AsyncLLM(llama, deterministic=True)
        pieces: list[tuple[tuple[int, ...], str]] = []
        async for delta in await llm.add_request(PROMPT, SAMPLED):
            pieces += [(each.token_ids, each.text) for each in delta.outputs if each.index == 1]
        for cut in range(len(pieces)):
            known = tuple(token_id for ids, _ in pieces[:cut] for token_id in ids)
            rest = await answer(llm, SAMPLED, {1: known})
            before = "".join(text for _, text in pieces[:cut])
            assert before + rest.outputs[0].text == "".join(text for _, text in pieces)
        await llm.shutdown()

    asyncio.run(scenario())
