"""Replicas that are Ray actors.

Workers of a replica are actors that it starts itself: Ray ends them with it, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import ray
import torch

from graftlm.config import EngineConfig
from graftlm.distributed.cores import cores_each
from graftlm.distributed.messages import AdapterRecipe, StageDescription
from graftlm.distributed.ray_cluster import RayCall, RayCluster, RayProcess, actor_options, describe_here
from graftlm.distributed.ray_spares import RaySpares
from graftlm.distributed.replica import Replica
from graftlm.distributed.replica_messages import ReplicaNews, ReplicaRequest
from graftlm.engine.executor import MovedStage, WorkerInfo


class ReplicaActor:
    """What runs in the process: an event loop beside the engine's thread, so that it answers while that computes."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._replica: Replica | None = None

    async def describe(self) -> StageDescription:
        return describe_here()

    async def load(self, config: EngineConfig) -> StageDescription:
        self._replica = await asyncio.to_thread(Replica, config)
        await self._replica.measure()
        return describe_here()

    async def submit(self, request: ReplicaRequest) -> None:
        self._loaded().submit(request)

    async def abort(self, job_id: str) -> None:
        self._loaded().abort(job_id)

    async def poll(self, forget: Sequence[str], prepare: Sequence[AdapterRecipe]) -> ReplicaNews:
        return await self._loaded().poll(forget=forget, prepare=prepare)

    async def drain(self, target: str) -> tuple[MovedStage, ...]:
        return await self._loaded().drain(target)

    async def leave(self) -> None:
        """End this process, with exit code 0, and its workers with it."""
        ray.actor.exit_actor()

    def _loaded(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("nothing was loaded")
        return self._replica


class RayReplica(RayProcess):
    """A replica in an actor. What is asked of it after its death is lost; `poll` says so."""

    def named(self, replica_id: str) -> RayReplica:
        """The same process, known as a replica."""
        return RayReplica(replica_id, self._actor)

    def load(self, config: EngineConfig) -> RayCall[StageDescription]:
        return self._call("load", config)

    def submit(self, request: ReplicaRequest) -> None:
        self._call("submit", request)

    def abort(self, job_id: str) -> None:
        self._call("abort", job_id)

    def poll(self, forget: Sequence[str], prepare: Sequence[AdapterRecipe]) -> RayCall[ReplicaNews]:
        return self._call("poll", tuple(forget), tuple(prepare))

    def drain(self, target: str) -> RayCall[tuple[MovedStage, ...]]:
        return self._call("drain", target)


class RayReplicaPool:
    """Where replicas come from: the cluster of a config. Methods may be called from any thread.

    Raises:
        ConfigurationError: there is no cluster at `ray_address`, or it is too small.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._num_threads = cores_each(config)
        self._cluster = RayCluster(config.ray_address, num_processes=config.num_processes, cpus_each=self._num_threads)
        # One that has workers only schedules and samples: its cores are theirs.
        self._num_cpus = 0 if config.has_workers else self._num_threads
        self._spares = RaySpares(self._spawn)
        self._num_spawned = 0

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        return self._spares.infos

    @property
    def nodes(self) -> tuple[str, ...]:
        fit = self._cluster.nodes(min_cpus=self._num_threads)
        return tuple(node for node in fit if node not in self.vacated)

    @property
    def vacated(self) -> frozenset[str]:
        return self._spares.vacated

    def vacate(self, node: str) -> None:
        self._spares.vacate(node)

    def readmit(self, node: str) -> None:
        self._spares.readmit(node)

    def start(self, replica_id: str, busy: Mapping[str, int]) -> RayReplica:
        """A process that has loaded nothing: a spare, or a new one."""
        return self._spares.take(busy).named(replica_id)

    def keep_spares(self, nodes: Iterable[str]) -> None:
        self._spares.keep(nodes)

    def close(self) -> None:
        """End the spares, and the cluster if it is the pool's own. May be called twice."""
        self._spares.close()
        self._cluster.close()

    def _spawn(self, node: str | None) -> RayReplica:
        self._num_spawned += 1
        actor_class = ray.remote(ReplicaActor).options(**actor_options(self._num_cpus, node, avoid=self.vacated))
        return RayReplica(f"spare-{self._num_spawned}", actor_class.remote(self._num_threads), node=node)
