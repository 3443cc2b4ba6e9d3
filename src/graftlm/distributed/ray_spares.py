"""Processes on the cluster that have imported everything and loaded nothing, until somebody takes them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from graftlm.distributed.ray_cluster import RayProcess
from graftlm.engine.executor import WorkerInfo

Process = TypeVar("Process", bound=RayProcess)


class RaySpares(Generic[Process]):
    """Spares by the nodes they were asked to be on. May be used from any thread.

    Args:
        spawn: starts a process on a node, as a spare that reserves nothing; where there is room if that is None, to be
            used at once.
    """

    def __init__(self, spawn: Callable[[str | None], Process]) -> None:
        self._spawn = spawn
        self._spares: list[Process] = []
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def infos(self) -> tuple[WorkerInfo, ...]:
        """Those that have started."""
        with self._lock:
            spares = [(spare, spare.description) for spare in self._spares]
        return tuple(
            WorkerInfo(id=spare.id, node=where.node, pid=where.pid, layers=None, adapters=(), state="spare")
            for spare, where in spares
            if where is not None
        )

    def take(self) -> Process:
        """A spare, or else a new process."""
        with self._lock:
            return self._spares.pop(0) if self._spares else self._spawn(None)

    def keep(self, nodes: Iterable[str]) -> None:
        """Have a spare on each of these nodes, soon; as many as it is named times."""
        with self._lock:
            if not self._is_closed:
                missing = Counter(nodes) - Counter(spare.node for spare in self._spares if spare.node is not None)
                self._spares.extend(self._spawn(node) for node in sorted(missing.elements()))

    def close(self) -> None:
        """End them. May be called twice."""
        with self._lock:
            self._is_closed = True
            for spare in self._spares:
                spare.kill()
            self._spares.clear()
