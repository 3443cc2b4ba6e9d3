"""Several steps on their way through the stages at once: same tokens, whatever goes wrong or away meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftlm import LLM
from graftlm.distributed.in_process import Fault, FaultKind
from graftlm.errors import StepFailed
from tests.distributed.rig import (
    Pipeline,
    answers,
    assert_nothing_is_held,
    open_pipeline,
    requests,
    run,
    tokens,
)

NAMES = ["plain", "dora", "late"]
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def chosen(adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: adapters[name] for name in NAMES}


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[tuple[int, ...]]:
    return tokens(answers(local, NAMES))


def num_steps(pipeline: Pipeline) -> int:
    work = pipeline.llm.workers[0].work
    assert work is not None
    return work.num_steps


def num_tokens(pipeline: Pipeline) -> int:
    work = pipeline.llm.workers[0].work
    assert work is not None
    return work.num_tokens


@pytest.mark.parametrize(("workers", "depth"), [(1, 3), (2, 2), (3, 3), (4, 7)])
def test_any_number_of_steps_in_flight_gives_the_same_tokens(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], workers: int, depth: int
) -> None:
    several = open_pipeline(base, chosen, workers=workers, steps_in_flight=depth)
    one = open_pipeline(base, chosen, workers=workers, steps_in_flight=1)
    assert run(several, NAMES) == run(one, NAMES) == expected
    # Each step has its part of the requests.
    assert num_steps(several) >= 1.5 * num_steps(one)


def test_a_pipeline_is_as_deep_as_it_has_stages_unless_it_is_told(base: Path, expected: list[tuple[int, ...]]) -> None:
    counts = {}
    for depth in (None, 1, 3):
        pipeline = open_pipeline(base, {}, workers=3, steps_in_flight=depth)
        answers(pipeline.llm, [])
        counts[depth] = num_steps(pipeline)
    assert counts[None] == counts[3] > counts[1]


def test_workers_that_die_with_several_steps_in_flight_cost_no_token(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]]
) -> None:
    faults = [Fault(kind="die", stage=stage, at=at) for stage, at in ((0, 1), (1, 5), (2, 9))]
    pipeline = open_pipeline(base, chosen, faults, worker_layers=(1, 1, 2), workers=3, steps_in_flight=4)
    num_free_blocks = pipeline.llm.num_free_blocks
    assert run(pipeline, NAMES) == expected
    assert pipeline.pool.pending_faults == []
    assert pipeline.llm.num_lost_workers == 3
    assert_nothing_is_held(pipeline, num_free_blocks)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_that_breaks_fails_the_requests_of_its_step_and_no_others(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], stage: int
) -> None:
    pipeline = open_pipeline(base, chosen, [Fault(kind="break", stage=stage, at=6)], steps_in_flight=3)
    num_free_blocks = pipeline.llm.num_free_blocks
    results = run(pipeline, NAMES)
    failed = [result for result in results if isinstance(result, StepFailed)]
    assert 0 < len(failed) <= NUM_REQUESTS / 3
    assert all(isinstance(error.__cause__, MemoryError) for error in failed)
    assert [ours for ours in results if ours not in failed] == [
        theirs for ours, theirs in zip(results, expected, strict=True) if ours not in failed
    ]
    assert pipeline.llm.num_lost_workers == 0
    # The others go on from where they were.
    assert num_tokens(pipeline) <= sum(len(prompt["prompt_token_ids"]) for prompt in requests(NAMES)[0]) + 8 * 12
    assert_nothing_is_held(pipeline, num_free_blocks)
    assert run(pipeline, NAMES) == expected


@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    faults=st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from([kind for kind in get_args(FaultKind) if kind != "break"]),
            stage=st.sampled_from([0, 2]),
            at=st.integers(1, 30),
        ),
        # After more losses in a row requests are given up.
        max_size=3,
    ),
    depth=st.integers(1, 5),
    aborts=st.lists(st.tuples(st.integers(1, 25), st.integers(0, NUM_REQUESTS - 1)), max_size=6),
    cache_blocks=st.sampled_from([8, 12, 64]),
)
def test_faults_and_departures_in_any_order_change_nobody_elses_tokens(
    base: Path,
    chosen: Mapping[str, Path],
    expected: list[tuple[int, ...]],
    faults: list[Fault],
    depth: int,
    aborts: list[tuple[int, int]],
    cache_blocks: int,
) -> None:
    """With too few blocks, requests are preempted while they are in flight."""
    block_bytes = 16 * 4 * 2 * 2 * 16 * 4
    pipeline = open_pipeline(
        base, chosen, faults, steps_in_flight=depth, kv_cache_bytes=cache_blocks * block_bytes, max_model_len=64
    )
    num_free_blocks = pipeline.llm.num_free_blocks

    def abort(count: int, job_ids: list[str]) -> None:
        for at, index in aborts:
            if at == count:
                pipeline.engine.core.abort(job_ids[index])

    gone = {index for _, index in aborts}
    results = run(pipeline, NAMES, abort)
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert isinstance(ours, tuple)
        assert ours == theirs or (index in gone and ours == theirs[: len(ours)])
    assert_nothing_is_held(pipeline, num_free_blocks)
    pipeline.llm.shutdown()
