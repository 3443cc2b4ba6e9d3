"""Workers that are Ray actors."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftlm.config import EngineConfig
from graftlm.distributed.cores import cores_each
from graftlm.distributed.gloo_collective import GlooCollective
from graftlm.distributed.heartbeat import Pulse, start_heart
from graftlm.distributed.messages import (
    AdapterRecipe,
    StageDescription,
    StagePlan,
    StageReply,
    StageStep,
    WorkerMeasure,
)
from graftlm.distributed.probe import Probe
from graftlm.distributed.ray_cluster import RayCall, RayCluster, RayProcess, actor_options, describe_here
from graftlm.distributed.ray_spares import RaySpares
from graftlm.distributed.stage import Stage
from graftlm.engine.executor import WorkerInfo

# How long a rank waits for another that computes. One that is gone is noticed sooner, by its heart or its connection.
RANK_SECONDS = 900.0


class StageProcess:
    """What runs in an actor: a process that has imported everything, and holds a stage once it was told which.

    Args:
        name: of the worker. hearts: where it shows that it lives, every `beat_seconds`.
    """

    def __init__(self, name: str, num_threads: int, hearts: str, beat_seconds: float) -> None:
        torch.set_num_threads(num_threads)
        start_heart(name, hearts, beat_seconds)
        self._stage: Stage | None = None
        # Of its ranks, for as long as it lives.
        self._collective: GlooCollective | None = None

    def describe(self) -> StageDescription:
        return describe_here()

    def measure(self, probe: Probe) -> WorkerMeasure:
        here = self.describe()
        return WorkerMeasure(node=here.node, seconds=probe.seconds(), free_bytes=here.free_bytes)

    def load(self, plan: StagePlan) -> StageDescription:
        # What was there goes first: the node may not have room for both.
        self._stage = None
        if plan.place is not None and self._collective is None:
            self._collective = GlooCollective(
                plan.place,
                address=ray.util.get_node_ip_address(),
                timeout_seconds=RANK_SECONDS,
            )
        self._stage = Stage(plan, self._collective)
        return self.describe()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the stage."""
        return getattr(self._stage, method)(*arguments)

    def leave(self) -> None:
        """End this process, with exit code 0."""
        ray.actor.exit_actor()


class RayWorker(RayProcess):
    """`Worker` in an actor."""

    def measure(self, probe: Probe) -> RayCall[WorkerMeasure]:
        return self._call("measure", probe)

    def load(self, plan: StagePlan) -> RayCall[StageDescription]:
        return self._call("load", plan)

    def begin(self, epoch: int) -> RayCall[None]:
        return self._ask("begin", epoch)

    def ensure_adapter(self, recipe: AdapterRecipe) -> RayCall[bool]:
        return self._ask("ensure_adapter", recipe)

    def forget_adapters(self, digests: Sequence[str]) -> RayCall[None]:
        return self._ask("forget_adapters", tuple(digests))

    def step(self, step: StageStep, before: Any) -> RayCall[StageReply]:
        return self._ask("step", step, before)

    def _ask(self, method: str, *arguments: Any) -> RayCall[Any]:
        return self._call("ask", method, *arguments)


class RayPool:
    """`WorkerPool` on the cluster of a config. One that it starts itself ends with the pool; one that this process is
    connected to already is used, and left as it is.

    Raises:
        ConfigurationError: there is no cluster at `ray_address`, or it is too small.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._num_threads = cores_each(config)
        self._cluster = RayCluster(config.ray_address, num_processes=config.num_processes, cpus_each=self._num_threads)
        self._spares = RaySpares(self._spawn)
        # Often enough that a beat that comes late is not taken for one that does not come.
        self._beat_seconds = min(1.0, config.worker_timeout_seconds / 8)
        self._hearts, self._hearts_place = _listen()
        self._stores: list[TCPStore] = []
        self._num_spawned = 0

    def rendezvous(self, size: int) -> str:
        store, place = _listen(size)
        self._stores.append(store)
        return place

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        return self._spares.infos

    @property
    def nodes(self) -> tuple[str, ...]:
        fit = self._cluster.nodes(min_cpus=self._num_threads)
        return tuple(node for node in fit if node not in self._spares.vacated)

    def vacate(self, node: str) -> None:
        self._spares.vacate(node)

    def readmit(self, node: str) -> None:
        self._spares.readmit(node)

    def take(self, busy: Mapping[str, int]) -> RayWorker:
        return self._spares.take(busy)

    def keep_spares(self, nodes: Iterable[str]) -> None:
        self._spares.keep(nodes)

    def close(self) -> None:
        self._spares.close()
        self._stores.clear()
        self._cluster.close()

    def _spawn(self, node: str | None) -> RayWorker:
        self._num_spawned += 1
        name = f"worker-{self._num_spawned}"
        actor_class = ray.remote(StageProcess).options(
            **actor_options(self._num_threads, node, avoid=self._spares.vacated)
        )
        actor = actor_class.remote(name, self._num_threads, self._hearts_place, self._beat_seconds)
        return RayWorker(name, actor, pulse=Pulse(self._hearts, name, self._beat_seconds), node=node)


def _listen(size: int | None = None) -> tuple[TCPStore, str]:
    """A store in this process, at the address by which the cluster knows this machine and no other.

    Args:
        size: how many will meet there, if that is known.
    """
    listening = socket.create_server((ray.util.get_node_ip_address(), 0))
    host, port = listening.getsockname()[:2]
    # The store closes it.
    store = TCPStore(host, port, size, True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, f"{host}:{port}"
