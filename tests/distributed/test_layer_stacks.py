"""Adapters with layers of their own order over workers: a batch comes back to a stage as often as its layers do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from graftlm import LLM
from graftlm.distributed.in_process import Fault
from graftlm.distributed.partition import spans_of
from graftlm.distributed.stack_passes import stack_passes
from tests.distributed.rig import (
    OPTIONS,
    answers,
    assert_nothing_is_held,
    assert_same_logits,
    open_pipeline,
    tokens,
)
from tests.tiny import ALL_PROJECTIONS, make_adapter

# Of four layers: back and forth, forth only, one of them again and again, without an end, the last one first.
STACKS = {
    "higher": [[0, 3], [1, 4], [0, 4]],
    "forth": [[0, 2], [1, 4]],
    "again": [[2, 3]] * 6,
    "lower": [[1, 3]],
    "late": [[3, 4], [0, 1]],
}


@pytest.fixture(scope="module")
def stacks(base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Beside an adapter over the base's own layers."""
    folder = tmp_path_factory.mktemp("stacks")
    made = {
        name: make_adapter(
            base,
            folder / name,
            seed=seed,
            r=3 + seed,
            use_dora=name == "higher",
            target_modules=ALL_PROJECTIONS,
            layer_replication=ranges,
        )
        for seed, (name, ranges) in enumerate(STACKS.items())
    }
    return {**made, "plain": adapters["plain"]}


@pytest.fixture(scope="module")
def whole(base: Path, stacks: dict[str, Path]) -> LLM:
    return LLM(base, adapters=stacks, **OPTIONS)


@pytest.mark.parametrize(
    ("workers", "layers", "ranks"), [(2, (), 1), (2, (1, 3), 1), (4, (), 1), (2, (3, 1), 2)], ids=str
)
def test_stacks_of_layers_go_through_the_stages_as_through_one_process(
    base: Path, stacks: dict[str, Path], whole: LLM, workers: int, layers: Sequence[int], ranks: int
) -> None:
    pipeline = open_pipeline(base, stacks, workers=workers, worker_layers=layers, tensor_parallel=ranks)
    num_free_blocks = pipeline.llm.num_free_blocks
    assert_same_logits(pipeline.llm, whole, list(stacks))
    assert tokens(answers(pipeline.llm, list(stacks))) == tokens(answers(whole, list(stacks)))
    assert_nothing_is_held(pipeline, num_free_blocks)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_lost_worker_costs_no_token_of_a_stack(base: Path, stacks: dict[str, Path], whole: LLM, stage: int) -> None:
    names = ["higher", "again", "plain"]
    faults = [Fault(kind="die", stage=stage, at=at) for at in (2, 19, 40)]
    pipeline = open_pipeline(base, stacks, faults, worker_layers=(2, 2))
    num_free_blocks = pipeline.llm.num_free_blocks
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(whole, names))
    assert pipeline.pool.pending_faults == []
    assert_nothing_is_held(pipeline, num_free_blocks)


def test_a_stage_has_of_a_stack_what_stands_in_its_own_layers(base: Path, stacks: dict[str, Path], whole: LLM) -> None:
    names = ["again", "lower"]
    pipeline = open_pipeline(base, {name: stacks[name] for name in names}, worker_layers=(2, 2))
    pipeline.llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 2, adapter=names)
    first, last = (worker.work.adapter_bytes for worker in pipeline.llm.workers if worker.work is not None)
    again, lower = (whole.adapters[name].num_bytes for name in names)
    assert (first, last) == (lower // 2, again + lower // 2)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((0, 1, 1, 2, 3), [[(0, 3), (3, 5)]]),
        ((0, 1, 2, 1, 2, 3), [[(0, 2), (2, 3)], [(3, 4), (4, 6)]]),
        ((3, 0), [[(0, 0), (0, 1)], [(1, 2), (2, 2)]]),
        ((0, 0), [[(0, 2), (2, 2)]]),
    ],
)
def test_a_stack_goes_through_the_stages_once_and_again_wherever_it_goes_back(
    layers: Sequence[int], expected: list[list[tuple[int, int]]]
) -> None:
    passes = stack_passes(layers, spans_of([0, 2, 4]))
    assert [[(depths.start, depths.stop) for depths in stages] for stages in passes] == expected
