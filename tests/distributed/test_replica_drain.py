"""Replicas that are drained while requests run. They are threads here, whose nodes are made up, and whole engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.distributed.in_process_replicas import InProcessReplicaPool
from graftlm.distributed.replicated_model import ReplicatedModel
from graftlm.engine.engine import Engine
from graftlm.engine.executor import MovedStage, WorkerInfo
from graftlm.engine.outputs import RequestFailure
from graftlm.errors import DrainFailed, ObjectNotFound
from tests.distributed.rig import NUM_LAYERS, OPTIONS
from tests.parity.oracle import prompt_of

NAMES: list[str | None] = [None, "plain", "late"] * 3
PROMPTS = [{"prompt_token_ids": list(prompt_of(20, seed))} for seed in range(len(NAMES))]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True)
TWO = ("one-node", "another-node")
DEADLINE_SECONDS = 120.0


class Cluster:
    """An engine over two replicas, and what its front end does: take steps, and act between them."""

    def __init__(self, base: Path, adapters: Mapping[str, Path], *, finish_seconds: float) -> None:
        self.pool = InProcessReplicaPool(TWO)
        self._acts: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._woken = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self._drain: Future[tuple[MovedStage, ...]] = Future()
        self._drain.set_result(())
        self.engine = Engine(
            EngineConfig(model=base, adapters=adapters, replicas=2, **OPTIONS),
            wake=self._woken.set,
            load=lambda config, checkpoint, residency: ReplicatedModel(
                config, checkpoint, lambda config: self.pool, finish_seconds=finish_seconds
            ),
        )

    def close(self) -> None:
        self._threads.shutdown()
        self.engine.close()

    def drain(self, target: str) -> None:
        self._drain = self._threads.submit(self.engine.drain, target, self._between_steps)
        self._drain.add_done_callback(lambda _: self._woken.set())

    @property
    def moved(self) -> tuple[MovedStage, ...]:
        """By the last drain."""
        return self._drain.result()

    def run(self, disturb: Callable[[int], None] = lambda count: None) -> list[set[tuple[int, ...]]]:
        """What each of the requests comes to, each of them sent again and again until no drain is under way. disturb:
        told after each delta how many there were."""
        engine, count = self.engine, 0
        came: list[set[tuple[int, ...]]] = [set() for _ in NAMES]
        running: dict[str, tuple[int, list[int]]] = {}

        def send(index: int) -> None:
            job = engine.make_job(PROMPTS[index], PARAMS, NAMES[index])
            running[job.job_id] = (index, [])
            engine.core.add(job)

        for index in range(len(NAMES)):
            send(index)
        while running or not self._drain.done():
            assert self._woken.wait(DEADLINE_SECONDS)
            self._woken.clear()
            while not self._acts.empty():
                self._acts.get()()
            for item in engine.core.step():
                assert not isinstance(item, RequestFailure), item
                index, ids = running[item.request_id]
                ids.extend(item.outputs[0].token_ids)
                if item.finished:
                    del running[item.request_id]
                    came[index].add(tuple(ids))
                    if not self._drain.done():
                        send(index)
                count += 1
                disturb(count)
        return came

    def replicas(self, state: str = "running") -> list[WorkerInfo]:
        return [worker for worker in self.engine.workers if worker.state == state]

    def _between_steps(self, act: Callable[[], None]) -> None:
        done = threading.Event()
        self._acts.put(lambda: (act(), done.set())[0])
        self._woken.set()
        assert done.wait(DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def chosen(adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: adapters[name] for name in ("plain", "late")}


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[set[tuple[int, ...]]]:
    return [{output.outputs[0].token_ids} for output in local.generate(PROMPTS, PARAMS, adapter=NAMES)]


@pytest.fixture
def cluster(base: Path, chosen: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(base, chosen, finish_seconds=request.param)
    yield cluster
    cluster.close()


def draining_after(num_deltas: int, cluster: Cluster, target: str) -> Callable[[int], None]:
    def disturb(count: int) -> None:
        if count == num_deltas:
            cluster.drain(target)

    return disturb


@pytest.mark.parametrize("cluster", [0.0, DEADLINE_SECONDS], indirect=True, ids=["moved", "finished"])
def test_requests_of_a_drained_replica_go_on_elsewhere_or_end_there_and_lose_no_token(
    cluster: Cluster, expected: list[set[tuple[int, ...]]]
) -> None:
    """And a drained node is left, and not come back to."""
    assert cluster.run(draining_after(20, cluster, "replica-1")) == expected
    [moved] = cluster.moved
    assert (moved.layers, moved.worker, moved.to) == ((0, NUM_LAYERS), "replica-1", "replica-1")
    assert cluster.pool.retired == ["replica-1"]
    assert {replica.id for replica in cluster.replicas()} == {"replica-1", "replica-2"}
    assert cluster.replicas("draining") == []
    left, kept = "one-node", "another-node"
    there = {replica.id for replica in cluster.replicas() if replica.node == left}
    assert cluster.run(draining_after(5, cluster, "one-no")) == expected
    assert {each.worker for each in cluster.moved} == there
    assert [replica.node for replica in cluster.replicas()] == [kept, kept]
    with pytest.raises(DrainFailed, match="no other node"):
        cluster.engine.drain(kept, lambda act: act())
    # It may be used again.
    assert cluster.pool.nodes == (kept,)
    assert (cluster.engine.num_moves, cluster.engine.num_lost_workers) == (1 + len(there), 0)
    assert {cluster.engine.registry.num_users(each.digest) for each in cluster.engine.adapters.values()} == {1}


@pytest.mark.parametrize("cluster", [0.0], indirect=True)
def test_what_is_no_replica_is_refused(cluster: Cluster) -> None:
    for target in ("replica-3", "replica-1/worker-1", "one"):
        with pytest.raises(ObjectNotFound, match="allowed: replica-1, replica-2, another-node, one-node"):
            cluster.engine.drain(target, lambda act: act())
    assert cluster.engine.num_moves == 0
