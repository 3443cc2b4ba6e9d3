"""What a lost worker had is computed again by its replacement and by no other; where that cannot be, by all. Tokens are
those of one process either way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers

from graftlm import LLM, EngineConfig, RequestOutput
from graftlm.distributed.in_process import Fault, FaultKind
from graftlm.engine.engine import Engine
from graftlm.engine.executor import WorkerWork
from tests.distributed.rig import GREEDY, OPTIONS, Pipeline, answers, assert_nothing_is_held, open_pipeline, tokens
from tests.parity import family_cases
from tests.parity.oracle import prompt_of
from tests.tiny import make_adapter, make_model

NAMES = ["plain", "dora", "late"]
# A stage for each of the first two layers, and one for the last two; a step is lost with its worker, and no more.
THREE: dict[str, Any] = {"workers": 3, "worker_layers": (1, 1, 2), "steps_in_flight": 1}
STEP_TOKENS: int = OPTIONS["max_num_batched_tokens"]


@pytest.fixture(scope="module")
def chosen(adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: adapters[name] for name in NAMES}


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[tuple[int, ...]]:
    return tokens(answers(local, NAMES))


@pytest.fixture(scope="module")
def undisturbed(base: Path, chosen: Mapping[str, Path]) -> WorkerWork:
    """What each stage does when nothing goes wrong."""
    pipeline = open_pipeline(base, chosen, **THREE)
    answers(pipeline.llm, NAMES)
    [work] = {(each.num_steps, each.num_tokens, each.num_replayed_tokens) for each in works(pipeline)}
    return WorkerWork(num_steps=work[0], num_tokens=work[1], num_replayed_tokens=work[2])


def works(pipeline: Pipeline) -> list[WorkerWork]:
    """Of the workers that have the stages now."""
    return [worker.work for worker in pipeline.llm.workers if worker.work is not None]


def repeated(pipeline: Pipeline, undisturbed: WorkerWork) -> list[int]:
    """Tokens that each stage's worker computed beyond what there was to compute, in steps that were answered."""
    return [work.num_tokens - undisturbed.num_tokens for work in works(pipeline)]


def test_nothing_is_replayed_while_nobody_dies(undisturbed: WorkerWork) -> None:
    prompts_and_answers = 4 * (40 + 7 + 1) + 12 * (GREEDY.max_tokens or 0)
    # The last token of an answer is not computed.
    assert undisturbed.num_tokens == prompts_and_answers - 12
    assert undisturbed.num_replayed_tokens == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["die", "freeze", "drop", "delay"])
def test_only_the_replacement_computes_again(
    base: Path,
    chosen: Mapping[str, Path],
    expected: list[tuple[int, ...]],
    undisturbed: WorkerWork,
    kind: FaultKind,
    stage: int,
) -> None:
    """Lost in a prompt, at first tokens, amid answers, and with the last token."""
    moments = [2, 7, undisturbed.num_steps, undisturbed.num_steps + 6]
    pipeline = open_pipeline(base, chosen, [Fault(kind=kind, stage=stage, at=at) for at in moments], **THREE)
    num_free_blocks = pipeline.llm.num_free_blocks
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    assert pipeline.pool.pending_faults == []
    assert pipeline.llm.num_lost_workers == len(moments)
    for index, (work, more) in enumerate(zip(works(pipeline), repeated(pipeline, undisturbed), strict=True)):
        assert work.num_replayed_tokens > STEP_TOKENS if index == stage else (work.num_replayed_tokens, more) == (0, 0)
    assert_nothing_is_held(pipeline, num_free_blocks)


def test_without_a_journal_all_compute_all_again(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], undisturbed: WorkerWork
) -> None:
    fault = Fault(kind="die", stage=1, at=undisturbed.num_steps - 2)
    pipeline = open_pipeline(base, chosen, [fault], activation_journal=False, **THREE)
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    first, _, last = repeated(pipeline, undisturbed)
    assert min(first, last) > 4 * STEP_TOKENS
    assert [work.num_replayed_tokens for work in works(pipeline)] == [0, 0, 0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_replacement_may_die_while_it_computes_again(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], undisturbed: WorkerWork, stage: int
) -> None:
    begun = undisturbed.num_steps - 4
    faults = [Fault(kind="die", stage=stage, at=begun + more) for more in (0, 1, 3)]
    pipeline = open_pipeline(base, chosen, faults, **THREE)
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    assert pipeline.pool.pending_faults == []
    assert [more for index, more in enumerate(repeated(pipeline, undisturbed)) if index != stage] == [0, 0]


@pytest.mark.parametrize("survivor", [0, 2])
def test_neighbours_that_die_together_are_replayed_together(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], undisturbed: WorkerWork, survivor: int
) -> None:
    faults = [Fault(kind="die", stage=stage, at=undisturbed.num_steps - 3) for stage in (0, 1, 2) if stage != survivor]
    pipeline = open_pipeline(base, chosen, faults, **THREE)
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    assert pipeline.llm.num_lost_workers == 2
    assert repeated(pipeline, undisturbed)[survivor] == 0
    replayed = [work.num_replayed_tokens for work in works(pipeline)]
    assert replayed[survivor] == 0
    assert replayed[1] == replayed[2 - survivor] > 4 * STEP_TOKENS


def test_another_stage_may_die_before_the_first_has_computed_again(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], undisturbed: WorkerWork
) -> None:
    """What has been replayed at the one by then is not replayed there once more."""
    begun = undisturbed.num_steps - 3
    faults = [Fault(kind="die", stage=2, at=begun), Fault(kind="die", stage=1, at=begun + 4)]
    pipeline = open_pipeline(base, chosen, faults, **THREE)
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    assert pipeline.llm.num_lost_workers == 2
    assert repeated(pipeline, undisturbed)[0] == 0
    first, second, third = (work.num_replayed_tokens for work in works(pipeline))
    assert first == 0
    assert second > 0
    assert second < third < 2 * second


@pytest.mark.parametrize("lost", [(0, 1, 2), (0, 2)], ids=str)
def test_when_all_or_both_ends_die_together_tokens_are_all_there_is(
    base: Path,
    chosen: Mapping[str, Path],
    expected: list[tuple[int, ...]],
    undisturbed: WorkerWork,
    lost: Sequence[int],
) -> None:
    faults = [Fault(kind="die", stage=stage, at=undisturbed.num_steps - 3) for stage in lost]
    pipeline = open_pipeline(base, chosen, faults, **THREE)
    num_free_blocks = pipeline.llm.num_free_blocks
    assert tokens(answers(pipeline.llm, NAMES)) == expected
    assert pipeline.llm.num_lost_workers == len(lost)
    assert [work.num_replayed_tokens for work in works(pipeline)] == [0, 0, 0]
    assert_nothing_is_held(pipeline, num_free_blocks)


def test_deterministic_answers_keep_their_bits_through_losses(base: Path, adapters: dict[str, Path]) -> None:
    config = EngineConfig(model=base, adapters=adapters, deterministic=True, **OPTIONS)
    local = LLM.over(Engine(config))
    faults = [Fault(kind="die", stage=stage, at=at) for stage, at in ((1, 9), (0, 24), (2, 40))]
    pipeline = open_pipeline(base, adapters, faults, deterministic=True, **{**THREE, "steps_in_flight": 3})
    with_logprobs = replace(GREEDY, logprobs=20)
    ours, theirs = (answers(engine, list(adapters), with_logprobs) for engine in (pipeline.llm, local))
    assert [output.outputs for output in ours] == [output.outputs for output in theirs]
    assert pipeline.pool.pending_faults == []
    assert all(work.num_replayed_tokens > 0 for work in works(pipeline))
    local.shutdown()


def test_sums_and_activated_adapters_are_replayed_as_themselves(
    base: Path, chosen: Mapping[str, Path], tmp_path: Path
) -> None:
    """An activated LoRA's rows before its invocation are the base's, again."""
    invocation = [7, 8, 9]
    adapters = {
        **chosen,
        "activated": make_adapter(base, tmp_path / "activated", seed=9, alora_invocation_tokens=invocation),
    }
    names = ["activated", "plain:0.7+late:-0.5", "dora"]
    prompts = [{"prompt_token_ids": [*prompt_of(21, seed), *invocation, *prompt_of(4, 50 + seed)]} for seed in range(3)]
    local = LLM(base, adapters=adapters, **OPTIONS)
    theirs = tokens(local.generate(prompts, GREEDY, adapter=names))
    assert theirs != tokens(local.generate(prompts, GREEDY))
    for stage in (0, 1, 2):
        pipeline = open_pipeline(base, adapters, [Fault(kind="die", stage=stage, at=6)], **THREE)
        assert tokens(pipeline.llm.generate(prompts, GREEDY, adapter=names)) == theirs
        replacement = pipeline.llm.workers[stage]
        assert replacement.work is not None
        assert replacement.work.num_replayed_tokens > STEP_TOKENS


def test_blocks_that_requests_share_are_replayed_once_and_known_again(base: Path, local: LLM) -> None:
    beginning = prompt_of(64, 1)
    prompts = [{"prompt_token_ids": [*beginning, index]} for index in range(6)]

    def run(llm: LLM) -> list[RequestOutput]:
        return llm.generate(prompts, GREEDY)

    pipeline = open_pipeline(base, {}, [Fault(kind="die", stage=2, at=8)], **THREE)
    assert tokens(run(pipeline.llm)) == tokens(run(local))
    work = works(pipeline)[2]
    assert len(beginning) < work.num_replayed_tokens <= len(beginning) + len(prompts) * (1 + (GREEDY.max_tokens or 0))
    assert [output.num_cached_tokens for output in run(pipeline.llm)] == [64] * 6


def test_what_lies_behind_a_window_is_computed_again_by_all(tmp_path: Path) -> None:
    """A window's blocks are given back, so there is nowhere to replay to; short sequences have lost none."""
    config = transformers.Gemma3TextConfig(**{**family_cases.GEMMA3, "sliding_window": 24})
    base = make_model(tmp_path / "base", config)
    local = LLM(base, **OPTIONS)
    replays: dict[Literal["short", "long"], int] = {}
    for kind, length in (("short", 6), ("long", 50)):
        prompts = [{"prompt_token_ids": list(prompt_of(length, seed))} for seed in range(3)]
        pipeline = open_pipeline(base, {}, [Fault(kind="die", stage=2, at=9)], workers=2, worker_layers=(2, 1))
        assert tokens(pipeline.llm.generate(prompts, GREEDY)) == tokens(local.generate(prompts, GREEDY))
        assert pipeline.llm.num_lost_workers == 1
        replays[kind] = works(pipeline)[1].num_replayed_tokens
    assert replays["short"] > 0
    assert replays["long"] == 0


def test_ranks_of_a_stage_are_replayed_together(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]]
) -> None:
    """The first rank keeps what the stage gives; it is what the next stage was given."""
    options: dict[str, Any] = {"workers": 2, "tensor_parallel": 2, "steps_in_flight": 1}
    for stage, survivor in ((0, 1), (2, 0)):
        # Every step is two calls.
        pipeline = open_pipeline(base, chosen, [Fault(kind="die", stage=stage, at=2 * 13)], **options)
        assert tokens(answers(pipeline.llm, NAMES)) == expected
        assert pipeline.llm.num_lost_workers == 2
        replayed = [work.num_replayed_tokens for work in works(pipeline)]
        assert replayed[survivor] == 0
        assert replayed[1 - survivor] > STEP_TOKENS


def test_the_journal_is_part_of_the_caches_memory(base: Path) -> None:
    """Each stage but the last keeps [64] float32 and a position beside 1 KiB of keys and values for a token."""
    counts = {
        (workers, journal): open_pipeline(
            base, {}, workers=workers, activation_journal=journal, kv_cache_bytes=16 * 1024 * 100, max_num_seqs=64
        ).llm.num_free_blocks
        for workers, journal in ((1, True), (3, True), (3, False))
    }
    assert counts == {(1, True): 100, (3, True): 1024 * 100 // (1024 + 2 * (64 * 4 + 4)), (3, False): 100}
