"""Keys and values of earlier requests: reused by whoever would compute the same, and by nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from graftlm import LLM, RequestOutput
from tests.engine.rig import BLOCK_BYTES, greedy, one, prompt, token_ids
from tests.tiny import make_adapter

BLOCK_SIZE = 16
INVOCATION = [17, 18]
# Longer than a block, and not a whole number of them.
LONG = prompt(100, seed=5)
PARAMS = greedy(12, ignore_eos=True)


@pytest.fixture
def engine(llama: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    """With nothing in its cache."""
    llm = LLM(llama, adapters=adapters, kv_cache_bytes=256 * BLOCK_BYTES)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def uncached(llama: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    llm = LLM(llama, adapters=adapters, kv_cache_bytes=256 * BLOCK_BYTES, prefix_cache=False)
    yield llm
    llm.shutdown()


def ask(llm: LLM, token_list: Sequence[int], adapter: str | None = None) -> RequestOutput:
    return llm.generate([{"prompt_token_ids": list(token_list)}], PARAMS, adapter=adapter)[0]


@pytest.mark.parametrize("adapter", [None, "green"])
def test_a_prompt_that_comes_again_is_not_computed_again(engine: LLM, uncached: LLM, adapter: str | None) -> None:
    ids = LONG["prompt_token_ids"]
    first, second = ask(engine, ids, adapter), ask(engine, ids, adapter)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96
    assert token_ids(first) == token_ids(second) == token_ids(ask(uncached, ids, adapter))
    assert ask(uncached, ids, adapter).num_cached_tokens == 0


def test_the_last_token_is_computed_though_its_block_is_there(engine: LLM) -> None:
    ids = LONG["prompt_token_ids"][:96]
    first = ask(engine, ids)
    second = ask(engine, ids)
    assert second.num_cached_tokens == 80
    assert token_ids(first) == token_ids(second)


def test_a_conversation_goes_on_from_its_own_answers(engine: LLM, uncached: LLM) -> None:
    ids = list(LONG["prompt_token_ids"][:60])
    turn = [*ids, *token_ids(ask(engine, ids)), 7, 8, 9]
    following = ask(engine, turn)
    # The answer's last token was never computed; all blocks before it are full.
    assert following.num_cached_tokens == 64
    assert token_ids(following) == token_ids(ask(uncached, turn))


def test_r061_nobody_reads_what_another_adapter_computed(engine: LLM, uncached: LLM) -> None:
    ids = LONG["prompt_token_ids"]
    answers = []
    for name in (None, "red", "green", "blue", "red:0.5+green:0.5"):
        output = ask(engine, ids, name)
        assert output.num_cached_tokens == 0
        assert token_ids(output) == token_ids(ask(uncached, ids, name))
        answers.append(tuple(token_ids(output)))
    assert len(set(answers)) == 5


def test_reloaded_adapter_does_not_read_the_old_adapters_cache(
    engine: LLM, uncached: LLM, llama: Path, tmp_path: Path
) -> None:
    ids = LONG["prompt_token_ids"]
    old = token_ids(ask(engine, ids, "green"))
    engine.unload_adapter("green")
    retrained = make_adapter(llama, tmp_path / "green", seed=99, r=3)
    engine.load_adapter("green", retrained)
    uncached.load_adapter("retrained", retrained)
    output = ask(engine, ids, "green")
    assert output.num_cached_tokens == 0
    assert token_ids(output) == token_ids(ask(uncached, ids, "retrained"))
    assert token_ids(output) != old
    uncached.unload_adapter("retrained")


def test_the_same_adapter_under_another_name_shares_its_blocks(engine: LLM, adapters: dict[str, Path]) -> None:
    engine.load_adapter("twin", adapters["green"])
    ids = LONG["prompt_token_ids"]
    first, second = ask(engine, ids, "green"), ask(engine, ids, "twin")
    assert second.num_cached_tokens == 96
    assert token_ids(first) == token_ids(second)


def test_an_activated_lora_shares_the_bases_blocks_up_to_its_invocation(
    engine: LLM, uncached: LLM, llama: Path, tmp_path: Path
) -> None:
    activated = make_adapter(llama, tmp_path / "a", seed=7, alora_invocation_tokens=INVOCATION)
    for llm in (engine, uncached):
        llm.load_adapter("activated", activated)
    quiet = [id_ for id_ in LONG["prompt_token_ids"] if id_ not in INVOCATION][:70]
    invoked = [*quiet, *INVOCATION, *quiet[:30]]
    base = ask(engine, invoked)
    with_adapter = ask(engine, invoked, "activated")
    # Blocks before position 70; the one in which it sets in is its own.
    assert with_adapter.num_cached_tokens == 64
    assert token_ids(with_adapter) == token_ids(ask(uncached, invoked, "activated")) != token_ids(base)
    again = ask(engine, invoked, "activated")
    assert again.num_cached_tokens == 96
    assert token_ids(again) == token_ids(with_adapter)
    # The same beginning, but activated later: what was active there then is dormant now.
    later = [*invoked, *INVOCATION, *quiet[:20]]
    assert token_ids(ask(engine, later, "activated")) == token_ids(ask(uncached, later, "activated"))
    uncached.unload_adapter("activated")


def test_answers_to_one_prompt_compute_it_once(engine: LLM, uncached: LLM) -> None:
    params = greedy(6, ignore_eos=True, n=4)
    output = one(engine, LONG, params)
    assert output.num_cached_tokens == 0
    assert [answer.token_ids for answer in output.outputs] == [
        answer.token_ids for answer in one(uncached, LONG, params).outputs
    ]


def test_requests_that_arrive_together_share_what_the_first_computes(engine: LLM, uncached: LLM) -> None:
    ids = list(LONG["prompt_token_ids"])
    prompts = [{"prompt_token_ids": [*ids, extra]} for extra in range(6)]
    names = [None, None, "red", None, "red", "green"]
    outputs = engine.generate(prompts, PARAMS, adapter=names)
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 0, 96, 96, 0]
    expected = uncached.generate(prompts, PARAMS, adapter=names)
    assert [token_ids(output) for output in outputs] == [token_ids(output) for output in expected]


def test_prompt_logprobs_are_computed_from_the_whole_prompt(engine: LLM) -> None:
    params = greedy(2, ignore_eos=True, prompt_logprobs=0)
    first, second = one(engine, LONG, params), one(engine, LONG, params)
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    values = [[entry.logprob or 0.0 for entry in output.prompt_logprobs or ()] for output in (first, second)]
    torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]))


def test_a_cache_that_is_too_small_forgets_the_oldest(llama: Path) -> None:
    llm = LLM(llama, kv_cache_bytes=9 * BLOCK_BYTES)
    prompts = [prompt(60, seed=seed)["prompt_token_ids"] for seed in range(3)]
    first = [token_ids(ask(llm, ids)) for ids in prompts]
    assert ask(llm, prompts[2]).num_cached_tokens == 48
    forgotten = ask(llm, prompts[0])
    assert forgotten.num_cached_tokens == 0
    assert token_ids(forgotten) == first[0]
    llm.shutdown()
