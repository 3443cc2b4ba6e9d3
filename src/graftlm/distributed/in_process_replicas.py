"""Replicas that are event loops in threads of this process: to test what becomes of their jobs without processes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from graftlm.config import EngineConfig
from graftlm.distributed.in_process import InProcessCall
from graftlm.distributed.messages import AdapterRecipe, StageDescription
from graftlm.distributed.replica import Replica
from graftlm.distributed.replica_messages import ReplicaNews, ReplicaRequest
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.executor import MovedStage, WorkerInfo

Answer = TypeVar("Answer")


class InProcessReplicaPool:
    """`ReplicaPool` whose nodes are made up.

    nodes_there: may be added to, as nodes join. retired: ids of those that have ended by being asked to.
    """

    spares: tuple[WorkerInfo, ...] = ()

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes_there = list(nodes)
        self.retired: list[str] = []
        self.vacated: frozenset[str] = frozenset()

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes_there if node not in self.vacated)

    def start(self, replica_id: str, busy: Mapping[str, int]) -> InProcessReplica:
        if not self.nodes:
            raise WorkerLost("there is no node")
        return InProcessReplica(replica_id, self, min(self.nodes, key=lambda node: busy.get(node, 0)))

    def vacate(self, node: str) -> None:
        self.vacated |= {node}

    def readmit(self, node: str) -> None:
        self.vacated -= {node}

    def keep_spares(self, nodes: Iterable[str]) -> None:
        pass

    def close(self) -> None:
        pass


class InProcessReplica:
    """`ReplicaHandle` of a replica that has a loop of its own."""

    def __init__(self, replica_id: str, pool: InProcessReplicaPool, node: str) -> None:
        self.id = replica_id
        self._pool = pool
        self._node = node
        self._replica: Replica | None = None
        self._is_gone = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=replica_id, daemon=True)
        self._thread.start()

    def load(self, config: EngineConfig) -> InProcessReplicaCall[StageDescription]:
        return self._ask(self._load(config))

    def submit(self, request: ReplicaRequest) -> None:
        self._tell(self._submit(request))

    def abort(self, job_id: str) -> None:
        self._tell(self._abort(job_id))

    def poll(self, forget: Sequence[str], prepare: Sequence[AdapterRecipe]) -> InProcessReplicaCall[ReplicaNews]:
        return self._ask(self._loaded.poll(forget=forget, prepare=prepare))

    def drain(self, target: str) -> InProcessReplicaCall[tuple[MovedStage, ...]]:
        return self._ask(self._loaded.drain(target))

    def retire(self, patience_seconds: float) -> None:
        self._pool.retired.append(self.id)
        self.kill()

    def kill(self) -> None:
        with self._lock:
            if self._is_gone:
                return
            self._is_gone = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def _loaded(self) -> Replica:
        if self._replica is None:
            raise WorkerLost(f"{self.id} has loaded nothing")
        return self._replica

    def _ask(self, answer: Coroutine[Any, Any, Answer]) -> InProcessReplicaCall[Answer]:
        with self._lock:
            if not self._is_gone:
                return InProcessReplicaCall(self.id, asyncio.run_coroutine_threadsafe(answer, self._loop))
        answer.close()
        raise WorkerLost(f"{self.id} is gone")

    def _tell(self, act: Coroutine[Any, Any, None]) -> None:
        """What a replica that is gone is told is lost."""
        with suppress(WorkerLost):
            self._ask(act)

    async def _load(self, config: EngineConfig) -> StageDescription:
        self._replica = await asyncio.to_thread(Replica, config)
        await self._replica.measure()
        return StageDescription(node=self._node, pid=os.getpid(), free_bytes=1 << 40)

    async def _submit(self, request: ReplicaRequest) -> None:
        self._loaded.submit(request)

    async def _abort(self, job_id: str) -> None:
        self._loaded.abort(job_id)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._replica is not None:
            await self._replica.close()


class InProcessReplicaCall(InProcessCall[Answer]):
    """`Call` of a loop in a thread."""

    def result(self, patience_seconds: float) -> Answer:
        try:
            return self._future.result()
        except CancelledError as gone:
            raise WorkerLost(f"{self._worker_id} is gone") from gone
