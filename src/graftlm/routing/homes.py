"""Where adapters belong: as many workers as the demand for each needs, and the same ones for as long as can be.

Knows digests, workers' names and numbers of requests; knows nothing of loads or memory.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence

# Workers are ranked up to here for each adapter; no adapter needs more homes than that to be found.
_MAX_RANKED = 64
_MASK = (1 << 64) - 1


class AdapterHomes:
    """Homes by rendezvous: each worker has a score for each adapter, and the best ones are its homes. A worker that
    comes or goes changes the homes of its own adapters and of no others.

    An adapter has `ceil(share of the requests * workers * headroom)` homes, at least one. Demand fades by half each
    `half_life_seconds`. A number of homes rises at once, and falls by one each `half_life_seconds` in which it was too
    high, so that a lull does not scatter what will be asked for again.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998 (rendezvous hashing).
    """

    def __init__(self, *, headroom: float = 1.3, half_life_seconds: float = 30.0) -> None:
        self._headroom = headroom
        self._half_life = half_life_seconds
        self._workers: tuple[str, ...] = ()
        self._hashes: dict[str, int] = {}
        self._ranked: dict[str, tuple[str, ...]] = {}
        self._demand: dict[str, float] = {}
        self._total = 0.0
        self._faded_at = 0.0
        self._counts: dict[str, int] = {}
        self._shrunk_at: dict[str, float] = {}

    def set_workers(self, worker_ids: Sequence[str]) -> None:
        """The workers that there are now."""
        if tuple(worker_ids) != self._workers:
            self._workers = tuple(worker_ids)
            self._hashes = {worker_id: _hash(worker_id) for worker_id in self._workers}
            self._ranked.clear()

    def asked_for(self, adapter: str, now: float) -> None:
        """A request for an adapter came. now: seconds on any clock that only goes forward."""
        self._fade(now)
        self._demand[adapter] = self._demand.get(adapter, 0.0) + 1.0
        self._total += 1.0

    def forget(self, adapter: str) -> None:
        """Nobody will ask for an adapter again. Unknown ones are fine."""
        self._total -= self._demand.pop(adapter, 0.0)
        for known in (self._ranked, self._counts, self._shrunk_at):
            known.pop(adapter, None)

    def share(self, adapter: str) -> float:
        """An adapter's part of the recent requests that were for adapters."""
        return self._demand.get(adapter, 0.0) / self._total if self._total > 0 else 0.0

    def homes(self, adapter: str, now: float) -> tuple[str, ...]:
        """The workers where an adapter belongs, best first."""
        count = self._count(adapter, now)
        ranked = self._ranked.get(adapter)
        if ranked is None or len(ranked) < min(count, len(self._workers)):
            own = _hash(adapter)
            scores = {worker_id: _mix(own ^ hashed) for worker_id, hashed in self._hashes.items()}
            ranked = tuple(heapq.nlargest(max(count, _MAX_RANKED), scores, key=scores.__getitem__))
            self._ranked[adapter] = ranked
        return ranked[:count]

    def _count(self, adapter: str, now: float) -> int:
        num_workers = len(self._workers)
        wanted = max(1, math.ceil(self.share(adapter) * num_workers * self._headroom))
        count = self._counts.get(adapter, 1)
        if wanted >= count:
            count = wanted
            self._shrunk_at[adapter] = now
        elif now - self._shrunk_at.get(adapter, now) >= self._half_life:
            count -= 1
            self._shrunk_at[adapter] = now
        count = min(count, num_workers)
        self._counts[adapter] = count
        return count

    def _fade(self, now: float) -> None:
        elapsed = now - self._faded_at
        if elapsed < self._half_life / 8:
            return
        self._faded_at = now
        factor = 0.5 ** (elapsed / self._half_life)
        self._demand = {adapter: demand * factor for adapter, demand in self._demand.items()}
        # What is less than this is a request of long ago.
        for adapter in [adapter for adapter, demand in self._demand.items() if demand < 0.01]:
            self.forget(adapter)
        self._total = sum(self._demand.values())


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """A score from 64 bits, one to one. Source: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
