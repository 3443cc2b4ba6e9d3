"""Processes on the cluster that have imported everything and loaded nothing, until somebody takes them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from graftlm.distributed.ray_cluster import RayProcess
from graftlm.engine.executor import WorkerInfo

Process = TypeVar("Process", bound=RayProcess)


class RaySpares(Generic[Process]):
    """Spares by the nodes they were asked to be on. May be used from any thread.

    vacated: nodes where nothing is to be started.

    Args:
        spawn: starts a process on a node, as a spare that reserves nothing; where there is room if that is None, to be
            used at once.
    """

    def __init__(self, spawn: Callable[[str | None], Process]) -> None:
        self._spawn = spawn
        self._spares: list[Process] = []
        self.vacated: frozenset[str] = frozenset()
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

    def take(self, busy: Mapping[str, int]) -> Process:
        """A spare, or else a new process.

        Args:
            busy: how much is on a node; of several spares the one with the least beside it is taken.
        """
        with self._lock:
            if not self._spares:
                return self._spawn(None)
            # The oldest of the best.
            spare = min(self._spares, key=lambda spare: busy.get(spare.node or "", 0))
            self._spares.remove(spare)
            return spare

    def keep(self, nodes: Iterable[str]) -> None:
        """Have a spare on each of these nodes, soon; as many as it is named times."""
        with self._lock:
            if not self._is_closed:
                wanted = Counter(node for node in nodes if node not in self.vacated)
                missing = wanted - Counter(spare.node for spare in self._spares if spare.node is not None)
                self._spares.extend(self._spawn(node) for node in sorted(missing.elements()))

    def vacate(self, node: str) -> None:
        """End the spares of a node, and have none there any more."""
        with self._lock:
            self.vacated |= {node}
            for spare in [spare for spare in self._spares if spare.node == node]:
                self._spares.remove(spare)
                spare.kill()

    def readmit(self, node: str) -> None:
        """Undo `vacate`."""
        with self._lock:
            self.vacated -= {node}

    def close(self) -> None:
        """End them. May be called twice."""
        with self._lock:
            self._is_closed = True
            for spare in self._spares:
                spare.kill()
            self._spares.clear()
