"""Which adapters are in the memory of replicas, as they have told."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from graftlm.adapters import LoadedAdapter
from graftlm.engine.residency import Residency, ResidencyState


class ReplicaResidency(Residency[LoadedAdapter]):
    """Nothing is held here: adapters are read to be checked, and replicas read them for themselves.

    Args:
        max_bytes: of each replica.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._told: dict[str, frozenset[str]] = {}
        self._bytes: dict[str, int] = {}
        self._telling = threading.Lock()

    def note(self, replica_id: str, resident: frozenset[str], num_bytes: int) -> None:
        """Take over what a replica has told."""
        with self._telling:
            self._told[replica_id], self._bytes[replica_id] = resident, num_bytes

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Unknown ones are fine."""
        with self._telling:
            self._told.pop(replica_id, None)
            self._bytes.pop(replica_id, None)

    def by_replica(self) -> Mapping[str, frozenset[str]]:
        """What each has."""
        with self._telling:
            return dict(self._told)

    @property
    def free_bytes(self) -> int:
        """Of the replica that has the least."""
        with self._telling:
            return self.max_bytes - max(self._bytes.values(), default=0)

    @property
    def resident(self) -> frozenset[str]:
        """In at least one of them."""
        with self._telling:
            return frozenset().union(*self._told.values())

    def state(self, digest: str) -> ResidencyState:
        return "resident" if digest in self.resident else "absent"

    def offer(self, digest: str, num_bytes: int, weights: LoadedAdapter) -> bool:
        return False

    def discard(self, digest: str) -> None:
        """Replicas are told to forget what has no name and no hold any more."""
