"""Replicas whose layers are on workers of their own: the system kills one of either kind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from graftlm import LLM, EngineConfig
from graftlm.checkpoint import open_checkpoint
from graftlm.distributed.replica_group import ReplicaPool
from graftlm.distributed.replicated_model import ReplicatedModel
from graftlm.engine.executor import WorkerInfo
from graftlm.errors import ConfigurationError
from tests.distributed.rig import OPTIONS, answers, open_pipeline, tokens

pytestmark = pytest.mark.long

NAMES = ["plain", "dora", "late"]
DEADLINE_SECONDS = 240.0


@pytest.fixture(scope="module")
def llm(cluster: None, base: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    chosen = {name: adapters[name] for name in NAMES}
    llm = LLM(base, adapters=chosen, replicas=2, workers=2, worker_cpus=1, worker_timeout_seconds=4.0, **OPTIONS)
    yield llm
    processes = [psutil.Process(worker.pid) for worker in llm.workers if psutil.pid_exists(worker.pid)]
    llm.shutdown()
    assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[tuple[int, ...]]:
    return tokens(answers(local, NAMES))


def stages_of(llm: LLM, replica: str) -> list[WorkerInfo]:
    return [worker for worker in llm.workers if worker.replica == replica and worker.layers is not None]


def kill(worker: WorkerInfo) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def test_each_replica_is_seen_with_its_own_workers(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert tokens(answers(llm, NAMES)) == expected
    fronts = sorted((worker for worker in llm.workers if worker.load is not None), key=lambda worker: worker.id)
    assert [(worker.id, worker.replica, worker.layers) for worker in fronts] == [
        ("replica-1", "replica-1", None),
        ("replica-2", "replica-2", None),
    ]
    for front in fronts:
        stages = stages_of(llm, front.id)
        assert [worker.layers for worker in stages] == [(0, 2), (2, 4)]
        assert {worker.id.partition("/")[0] for worker in stages} == {front.id}
        assert all(worker.work is not None and worker.work.num_steps > 0 for worker in stages)
    pids = [worker.pid for worker in llm.workers]
    assert len(set(pids)) == len(pids)
    assert os.getpid() not in pids

    def held(layers: tuple[int, int]) -> set[str]:
        return {name for worker in llm.workers if worker.layers == layers for name in worker.adapters}

    # What is said of workers is a second old.
    while held((2, 4)) != set(NAMES):
        answers(llm, NAMES)
    # Its layer is the last: the first workers have none of it.
    assert held((0, 2)) == {"plain", "dora"}


def test_a_killed_worker_is_replaced_within_its_replica(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    fronts = {worker.pid for worker in llm.workers if worker.load is not None}
    victim = stages_of(llm, "replica-1")[1]
    others = {worker.pid for worker in stages_of(llm, "replica-2")}
    kill(victim)

    def is_replaced() -> bool:
        stages = stages_of(llm, "replica-1")
        return [worker.layers for worker in stages] == [(0, 2), (2, 4)] and victim.pid not in {
            worker.pid for worker in stages
        }

    while not is_replaced():
        assert tokens(answers(llm, NAMES)) == expected
    assert {worker.pid for worker in llm.workers if worker.load is not None} == fronts
    assert {worker.pid for worker in stages_of(llm, "replica-2")} == others
    assert llm.num_lost_workers == 1


def test_a_worker_within_a_replica_is_drained(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    answers(llm, NAMES)
    victim = stages_of(llm, "replica-1")[0]
    process = psutil.Process(victim.pid)
    [moved] = llm.drain(victim.id)
    assert (moved.worker, moved.layers) == (victim.id, victim.layers)
    assert moved.to.startswith("replica-1/")
    assert psutil.wait_procs([process], timeout=DEADLINE_SECONDS)[1] == []
    assert tokens(answers(llm, NAMES)) == expected


def test_a_killed_replica_takes_its_workers_along_and_none_of_its_requests(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    front = next(worker for worker in llm.workers if worker.id == "replica-2")
    orphans = [psutil.Process(worker.pid) for worker in llm.workers if worker.replica == front.id and worker != front]
    before = llm.num_lost_workers
    assert len(orphans) >= 2
    kill(front)
    assert tokens(answers(llm, NAMES)) == expected
    assert psutil.wait_procs(orphans, timeout=DEADLINE_SECONDS)[1] == []
    assert llm.num_lost_workers == before + 1


def test_more_workers_than_there_are_cores_for_are_refused(cluster: None, base: Path) -> None:
    with pytest.raises(ConfigurationError, match="8 workers of 2 cores; allowed: 4 of them on 8 cores of 1 nodes"):
        LLM(base, replicas=2, workers=2, tensor_parallel=2, worker_cpus=2)


def test_more_workers_than_layers_are_refused_before_anything_is_started(base: Path) -> None:
    with pytest.raises(ConfigurationError, match="more workers than layers"):
        LLM(base, replicas=2, workers=5, worker_cpus=100)


def no_pool(config: EngineConfig) -> ReplicaPool:
    raise NotImplementedError


def test_what_a_replica_with_workers_holds_is_what_workers_hold(base: Path) -> None:
    """Room for keys and values, which ranks share out; and no layers in another order."""
    config = EngineConfig(model=base, replicas=2, tensor_parallel=2, **OPTIONS)
    checkpoint = open_checkpoint(base)
    model = ReplicatedModel(config, checkpoint, no_pool)
    pipeline = open_pipeline(base, {}, workers=None, tensor_parallel=2)
    assert model.plan.num_blocks == (pipeline.llm.num_free_blocks,)
    assert not model.has_all_layers
    assert ReplicatedModel(EngineConfig(model=base, replicas=2), checkpoint, no_pool).has_all_layers
