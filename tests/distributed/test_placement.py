"""Where layers are, and how they move while requests run. The machines are made up, the layers and tokens are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftlm import LLM, SamplingParams
from graftlm.distributed.in_process import Fault, Machine
from graftlm.distributed.span_balance import STEPS_PER_CHECK
from graftlm.errors import ConfigurationError, DrainFailed, ObjectNotFound
from graftlm.routing.spans import CHECKS
from tests.distributed.rig import (
    NUM_LAYERS,
    Pipeline,
    answers,
    assert_nothing_is_held,
    open_pipeline,
    run,
    tokens,
)

NAMES = ["plain", "dora", "late"]
TWO = (Machine(node="one-node"), Machine(node="another-node"))


@pytest.fixture(scope="module")
def chosen(adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: adapters[name] for name in NAMES}


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[tuple[int, ...]]:
    return tokens(answers(local, NAMES))


def spans(pipeline: Pipeline) -> list[tuple[int, int] | None]:
    return [worker.layers for worker in pipeline.llm.workers]


def nodes(pipeline: Pipeline) -> list[str]:
    return [worker.node for worker in pipeline.llm.workers]


def assert_layers_are_covered(pipeline: Pipeline) -> None:
    """Each has one holder."""
    bounds = [worker.layers for worker in pipeline.llm.workers if worker.layers is not None]
    assert [bounds[0][0], bounds[-1][1]] == [0, NUM_LAYERS]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))


def assert_adapters_are_covered(pipeline: Pipeline) -> None:
    """Each that was asked for is where layers are that it touches."""
    assert_layers_are_covered(pipeline)
    for worker in pipeline.llm.workers:
        assert worker.layers is not None
        has_last = worker.layers[1] == NUM_LAYERS
        assert set(worker.adapters) == set(NAMES if has_last else NAMES[:2])


@pytest.mark.parametrize(
    ("seconds", "layers"), [((1.0, 1.0), (2, 2)), ((1.0, 1.2), (2, 2)), ((2.5, 1.0), (1, 3)), ((1.0, 2.5), (3, 1))]
)
def test_a_faster_worker_gets_more_layers_and_noise_moves_none(
    base: Path,
    chosen: Mapping[str, Path],
    expected: list[tuple[int, ...]],
    seconds: tuple[float, float],
    layers: object,
) -> None:
    machines = [Machine(node=str(index), probe_seconds=each) for index, each in enumerate(seconds)]
    pipeline = open_pipeline(base, chosen, machines=machines)
    assert tuple(stop - start for start, stop in filter(None, spans(pipeline))) == layers
    assert run(pipeline, NAMES) == expected


def test_a_worker_without_room_leaves_layers_to_the_other(base: Path) -> None:
    machines = [Machine(node="full", free_bytes=600_000), Machine(node="empty")]
    assert spans(open_pipeline(base, {}, machines=machines)) == [(0, 1), (1, 4)]
    with pytest.raises(ConfigurationError, match="the workers do not have the memory"):
        open_pipeline(base, {}, machines=[Machine(node="full", free_bytes=600_000)])
    told = open_pipeline(base, {}, machines=[Machine(node="full", free_bytes=1)], worker_layers=(3, 1))
    assert spans(told) == [(0, 3), (3, 4)]


def test_layers_move_to_the_worker_whose_steps_are_short_and_no_token_changes(
    base: Path, chosen: Mapping[str, Path], local: LLM
) -> None:
    """A node leaves, and the one that takes its layers needs three times as long for them."""
    machines = [Machine(node="stays-here", layer_seconds=1.0), Machine(node="leaves-us", layer_seconds=1.0)]
    pipeline = open_pipeline(base, chosen, machines=machines, rebalance=True)
    num_free_blocks = pipeline.llm.num_free_blocks
    pipeline.pool.machines.append(Machine(node="joins-us", layer_seconds=3.0))
    pipeline.llm.drain("leaves-us")
    assert nodes(pipeline) == ["stays-here", "joins-us"]
    assert spans(pipeline) == [(0, 2), (2, 4)]
    long = SamplingParams(max_tokens=CHECKS * STEPS_PER_CHECK // 2 + 20, temperature=0, ignore_eos=True)
    # Two steps are in flight, each with a part of the requests.
    assert tokens(answers(pipeline.llm, ["late"], long)) == tokens(answers(local, ["late"], long))
    assert spans(pipeline) == [(0, 3), (3, 4)]
    # One by the drain; then two have got other layers, and are the same processes.
    assert pipeline.llm.num_moves == 3
    assert pipeline.llm.num_lost_workers == 0
    assert pipeline.pool.num_taken == 3
    assert [worker.adapters for worker in pipeline.llm.workers] == [(), ("late",)]
    assert_nothing_is_held(pipeline, num_free_blocks)


def drained_at(pipeline: Pipeline, scene: Mapping[int, str]) -> Callable[[int, list[str]], None]:
    """Drain these targets after so many steps."""

    def disturb(count: int, job_ids: list[str]) -> None:
        if count in scene:
            pipeline.engine.drain(scene[count], lambda act: act())

    return disturb


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_drained_workers_end_and_no_token_is_lost(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], tensor_parallel: int
) -> None:
    """During the prompts, among prompts and decodes, and near the end; the second of them twice."""
    pipeline = open_pipeline(base, chosen, tensor_parallel=tensor_parallel)
    num_free_blocks = pipeline.llm.num_free_blocks
    first, *_, second = [worker.id for worker in pipeline.llm.workers if not worker.rank]
    ranks = tensor_parallel - 1
    third = f"worker-{2 * tensor_parallel + tensor_parallel + 1}"
    scene = {1: first, 9: f"{second}.1" if ranks else second, 14: third}
    assert run(pipeline, NAMES, drained_at(pipeline, scene)) == expected
    assert len(pipeline.pool.retired) == 3 * tensor_parallel
    assert {first, second, third} <= set(pipeline.pool.retired)
    assert pipeline.llm.num_moves == 3
    assert pipeline.llm.num_lost_workers == 0
    assert spans(pipeline) == sorted([(0, 2), (2, 4)] * tensor_parallel)
    assert_nothing_is_held(pipeline, num_free_blocks)


def test_a_drained_node_is_left_and_not_come_back_to(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]]
) -> None:
    pipeline = open_pipeline(base, chosen, [Fault(kind="die", stage=0, at=14)], machines=TWO)
    assert nodes(pipeline) == ["one-node", "another-node"]
    assert run(pipeline, NAMES, drained_at(pipeline, {4: "another"})) == expected
    # One of them has died since.
    assert pipeline.pool.pending_faults == []
    assert nodes(pipeline) == ["one-node", "one-node"]
    assert_adapters_are_covered(pipeline)


def test_a_node_that_joins_takes_what_is_drained(base: Path, chosen: Mapping[str, Path]) -> None:
    pipeline = open_pipeline(base, chosen, machines=TWO[:1])
    pipeline.pool.machines.append(TWO[1])
    [moved] = pipeline.llm.drain("worker-2")
    assert (moved.layers, moved.worker, moved.to, moved.node) == ((2, 4), "worker-2", "worker-3", "another-node")
    assert nodes(pipeline) == ["one-node", "another-node"]


def test_what_cannot_be_drained_is_refused_and_stays(base: Path, local: LLM) -> None:
    pipeline = open_pipeline(base, {}, machines=TWO[:1])
    with pytest.raises(
        ObjectNotFound, match=r"no worker and no node has .*got: worker-9; allowed: worker-1, worker-2, one-"
    ):
        pipeline.llm.drain("worker-9")
    with pytest.raises(ObjectNotFound):
        # Too short to be meant.
        pipeline.llm.drain("one")
    with pytest.raises(DrainFailed, match="no other node"):
        pipeline.llm.drain("one-node")
    with pytest.raises(ObjectNotFound, match="in this process"):
        local.drain("worker-1")
    assert pipeline.llm.num_moves == 0
    assert [worker.id for worker in pipeline.llm.workers] == ["worker-1", "worker-2"]
    # It may be used again, by workers that replace each other.
    assert [stage.node for stage in pipeline.llm.drain("worker-1")] == ["one-node"]
    assert tokens(answers(pipeline.llm, [])) == tokens(answers(local, []))


@given(
    st.lists(st.sampled_from(["join", "drain first", "drain last", "drain node"]), min_size=1, max_size=3),
    st.lists(st.integers(1, 60), max_size=2),
)
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_comes_and_goes_every_layer_and_adapter_keeps_a_holder(
    base: Path, chosen: Mapping[str, Path], expected: list[tuple[int, ...]], events: list[str], deaths: list[int]
) -> None:
    """Tokens are right only if each adapter was there in every layer, also when one comes anew."""
    faults = [Fault(kind="die", stage=2, at=at) for at in deaths]
    pipeline = open_pipeline(base, chosen, faults, machines=TWO)
    num_joined = 0
    for event in events:
        workers = pipeline.llm.workers
        if event == "join":
            num_joined += 1
            pipeline.pool.machines.append(Machine(node=f"joined-{num_joined}"))
        elif event != "drain node":
            pipeline.llm.drain(workers[0 if event == "drain first" else -1].id)
        elif set(pipeline.pool.nodes) - {workers[0].node}:
            pipeline.llm.drain(workers[0].node)
        assert run(pipeline, NAMES) == expected
        assert_layers_are_covered(pipeline)
    pipeline.pool.pending_faults.clear()
    assert run(pipeline, NAMES) == expected
    assert_adapters_are_covered(pipeline)
