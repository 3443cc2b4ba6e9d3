"""Which adapters are in memory and which may be evicted. Knows digests, bytes, pins and recency; the weights are
opaque to it. Knows nothing of names, files or requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

ResidencyState = Literal["absent", "loading", "resident"]

Weights = TypeVar("Weights")


@dataclass(kw_only=True)
class _Resident(Generic[Weights]):
    num_bytes: int
    weights: Weights
    pins: int = 0


class Residency(Generic[Weights]):
    """Weights by digest within a byte budget, the least recently pinned evicted first.

    A digest is absent, loading or resident. What is loading counts with its full size from the moment it begins. What
    is pinned is never evicted; only what is resident can be pinned, and only what is pinned can be computed with.
    Every method may be called from any thread.

    Args:
        max_bytes: of everything resident and loading together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._loading: dict[str, int] = {}
        # In order of use, the longest unused first.
        self._resident: OrderedDict[str, _Resident[Weights]] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            used = sum(entry.num_bytes for entry in self._resident.values())
            return self.max_bytes - used - sum(self._loading.values())

    @property
    def resident(self) -> frozenset[str]:
        """The digests in memory."""
        with self._lock:
            return frozenset(self._resident)

    @property
    def num_pinned(self) -> int:
        """How many adapters are pinned."""
        with self._lock:
            return sum(entry.pins > 0 for entry in self._resident.values())

    def state(self, digest: str) -> ResidencyState:
        with self._lock:
            if digest in self._resident:
                return "resident"
            return "loading" if digest in self._loading else "absent"

    def pin(self, digest: str) -> bool:
        """Keep a digest in memory until `unpin`, as often as it was pinned. False when it is not resident."""
        with self._lock:
            entry = self._resident.get(digest)
            if entry is None:
                return False
            entry.pins += 1
            self._resident.move_to_end(digest)
            return True

    def unpin(self, digest: str) -> None:
        """Take one pin back.

        Raises:
            ValueError: it is not pinned.
        """
        with self._lock:
            self._pinned(digest).pins -= 1

    def weights(self, digest: str) -> Weights:
        """The weights of a pinned digest.

        Raises:
            ValueError: it is not pinned.
        """
        with self._lock:
            return self._pinned(digest).weights

    def offer(self, digest: str, num_bytes: int, weights: Weights) -> bool:
        """Take weights that were read anyway, if they are absent and fit in what is free: nothing is evicted for them.

        Returns: whether the digest is resident now.
        """
        with self._lock:
            if self.state(digest) == "absent" and num_bytes <= self.free_bytes:
                self._resident[digest] = _Resident(num_bytes=num_bytes, weights=weights)
            return digest in self._resident

    def reserve(self, digest: str, num_bytes: int, *, keep: Set[str], work: Mapping[str, int]) -> bool:
        """Begin loading an absent digest, if there is room once what is not pinned has been evicted.

        Args:
            keep: digests that are not evicted.
            work: see `in_the_way`.

        Returns: whether it is loading now; if not, nothing was evicted.

        Raises:
            ValueError: it is not absent.
        """
        with self._lock:
            if self.state(digest) != "absent":
                raise ValueError(f"{digest} is {self.state(digest)}")
            evicted = self._evicted_for(num_bytes, keep, work)
            if evicted is None or any(self._resident[other].pins for other in evicted):
                return False
            for other in evicted:
                del self._resident[other]
            self._loading[digest] = num_bytes
            return True

    def in_the_way(self, num_bytes: int, *, keep: Set[str], work: Mapping[str, int]) -> frozenset[str]:
        """What would have to be evicted for a digest of this size, pinned or not; empty when even that is not enough
        while other loads are under way.

        Args:
            keep: digests that stay.
            work: how much the users of pinned digests have left to do; those with the least go first.
        """
        with self._lock:
            return frozenset(self._evicted_for(num_bytes, keep, work) or ())

    def complete(self, digest: str, weights: Weights) -> None:
        """End a load well.

        Raises:
            ValueError: it is not loading.
        """
        with self._lock:
            self._resident[digest] = _Resident(num_bytes=self._end_load(digest), weights=weights)

    def cancel(self, digest: str) -> None:
        """End a load without weights.

        Raises:
            ValueError: it is not loading.
        """
        with self._lock:
            self._end_load(digest)

    def discard(self, digest: str) -> None:
        """Forget a digest that nobody will ask for again.

        Raises:
            ValueError: it is pinned or loading: somebody does.
        """
        with self._lock:
            entry = self._resident.get(digest)
            if digest in self._loading or (entry is not None and entry.pins):
                raise ValueError(f"{digest} is in use")
            self._resident.pop(digest, None)

    def _pinned(self, digest: str) -> _Resident[Weights]:
        entry = self._resident.get(digest)
        if entry is None or not entry.pins:
            raise ValueError(f"{digest} is not pinned")
        return entry

    def _end_load(self, digest: str) -> int:
        if digest not in self._loading:
            raise ValueError(f"{digest} is not loading")
        return self._loading.pop(digest)

    def _evicted_for(self, num_bytes: int, keep: Set[str], work: Mapping[str, int]) -> list[str] | None:
        """What has to go for so many bytes, the unpinned first; None when not even all of it is enough."""
        missing = num_bytes - self.free_bytes
        candidates = [digest for digest in self._resident if digest not in keep]
        # Stable: among equals the longest unused goes first.
        candidates.sort(key=lambda digest: work.get(digest, 1) if self._resident[digest].pins else 0)
        evicted = []
        for digest in candidates:
            if missing <= 0:
                break
            evicted.append(digest)
            missing -= self._resident[digest].num_bytes
        return evicted if missing <= 0 else None
