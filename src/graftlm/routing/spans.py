"""Which layers each worker of a chain takes: at the start by what the workers can do, later by what they have done.

In a chain every layer has exactly one holder, and that one has of each adapter what concerns its layers. So no move can
leave a layer, or an adapter at one, without a holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from graftlm.errors import ConfigurationError

# A move has to shorten a step by this much, and to do so in so many checks one after the other.
MIN_GAIN = 1.25
CHECKS = 3
# Speeds are told apart in such steps: a probe's noise is no difference.
SPEED_STEP = Fraction(3, 2)

Bounds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ChainWeights:
    """What the layers of a model weigh, in work or in bytes.

    before, after: what the first worker bears besides its layers, and the last.
    boundaries: layers that workers after the first may begin with; None for any.
    """

    layers: tuple[int, ...]
    before: int
    after: int
    boundaries: tuple[int, ...] | None = None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where a worker's layers may end."""
        inner = range(1, len(self.layers)) if self.boundaries is None else self.boundaries
        return (*inner, len(self.layers))

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        return (0, *accumulate(self.layers))

    def of(self, start: int, stop: int) -> int:
        """Of a worker with layers [start, stop)."""
        ends = (self.before if start == 0 else 0) + (self.after if stop == len(self.layers) else 0)
        return self._sums[stop] - self._sums[start] + ends


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a worker can take. speed: work per time, in any unit that is the same for all. memory_bytes: for its layers;
    None if that is no question."""

    speed: Fraction
    memory_bytes: int | None = None


def stepped_speeds(seconds: Sequence[float]) -> list[Fraction]:
    """Speeds of workers that took so long for the same, relative to the fastest and rounded to powers of `SPEED_STEP`:
    what is no slower than 1.22 times counts as equal, so that equal machines get equal shares every time."""
    fastest = min(seconds)
    speeds = []
    for own in seconds:
        speed, edge = Fraction(1), SPEED_STEP**0.5
        while own / fastest > edge:
            speed, edge = speed / SPEED_STEP, edge * float(SPEED_STEP)
        speeds.append(speed)
    return speeds


def best_bounds(work: ChainWeights, capacities: Sequence[Capacity], *, memory: ChainWeights) -> Bounds:
    """Where each worker's layers begin, and the end: the slowest worker is as fast as can be, and none has more bytes
    than memory.

    Args:
        capacities: of the workers, in the chain's order. memory: what layers weigh in bytes.

    Raises:
        ConfigurationError: there are more workers than layers, or than stretches of layers that can be apart; or they
            have too little memory.
    """
    num_layers = len(work.layers)
    if len(capacities) > num_layers:
        raise ConfigurationError(
            "there are more workers than layers", got=len(capacities), allowed=f"1 to {num_layers}"
        )
    if len(capacities) > len(work.ends):
        raise ConfigurationError(
            "there are more workers than stretches of layers: some layers read keys and values of others, "
            "and have to be where those are",
            got=len(capacities),
            allowed=f"1 to {len(work.ends)}",
        )
    # best[stop]: the time of the slowest of the workers so far, which end there, and where each begins.
    best: dict[int, tuple[Fraction, Bounds]] = {0: (Fraction(0), (0,))}
    for index, capacity in enumerate(capacities):
        num_left = len(capacities) - index - 1
        stops = work.ends[index : len(work.ends) - num_left] if num_left else (num_layers,)
        reached: dict[int, tuple[Fraction, Bounds]] = {}
        for stop in stops:
            ways = [
                (max(slowest, work.of(start, stop) / capacity.speed), (*bounds, stop))
                for start, (slowest, bounds) in best.items()
                if start < stop and _fits(memory.of(start, stop), capacity)
            ]
            if ways:
                reached[stop] = min(ways)
        best = reached
    if num_layers not in best:
        raise ConfigurationError(
            "the workers do not have the memory for the model's layers and their KV cache",
            got=f"{memory.of(0, num_layers)} bytes in all",
            allowed=", ".join(str(capacity.memory_bytes) for capacity in capacities) + " bytes",
            do="use more workers, lower kv_cache_bytes, quantise, or share the layers out yourself with worker_layers",
        )
    return best[num_layers][1]


class SpanMover:
    """Says when the layers of a chain are to be shared out anew.

    It goes by the time that each worker took for the same steps, which it takes to be in proportion to its layers. The
    gain has to be there in `CHECKS` checks one after the other, the time in which workers reload counted. What was
    tried is not tried again, so that it comes to rest if times are not in proportion after all.

    Args:
        horizon_seconds: for which a move has to pay.
    """

    def __init__(self, work: ChainWeights, *, memory: ChainWeights, horizon_seconds: float = 600.0) -> None:
        self._work = work
        self._memory = memory
        self._horizon_seconds = horizon_seconds
        self._tried: set[Bounds] = set()
        self._seen: list[Sequence[float]] = []

    def forget(self) -> None:
        """Other workers are in the chain: nothing was tried with these."""
        self._tried.clear()
        self._seen.clear()

    def check(
        self,
        bounds: Bounds,
        seconds: Sequence[float],
        *,
        reload_seconds: float,
        memory_bytes: Sequence[int | None],
    ) -> Bounds | None:
        """How the layers are to be shared out now; None if they stay.

        Args:
            bounds: how they are. seconds: of each worker, for the same steps since the last check. reload_seconds: what
            a move takes. memory_bytes: of each worker, for its layers.
        """
        self._tried.add(bounds)
        if self._better(bounds, seconds, reload_seconds, memory_bytes) is None:
            self._seen.clear()
            return None
        self._seen.append(seconds)
        if len(self._seen) < CHECKS:
            return None
        totals = [sum(each) for each in zip(*self._seen, strict=True)]
        self._seen.clear()
        return self._better(bounds, totals, reload_seconds, memory_bytes)

    def _better(
        self,
        bounds: Bounds,
        seconds: Sequence[float],
        reload_seconds: float,
        memory_bytes: Sequence[int | None],
    ) -> Bounds | None:
        if not all(own > 0 for own in seconds):
            return None
        # In nanoseconds: fractions of any float are long.
        capacities = [
            Capacity(speed=Fraction(self._work.of(*span), max(1, round(1e9 * own))), memory_bytes=limit)
            for span, own, limit in zip(pairwise(bounds), seconds, memory_bytes, strict=True)
        ]
        try:
            best = best_bounds(self._work, capacities, memory=self._memory)
        except ConfigurationError:
            # Memory has become scarce; what is loaded stays where it is.
            return None
        after = max(
            self._work.of(*span) / capacity.speed for span, capacity in zip(pairwise(best), capacities, strict=True)
        )
        kept = max(0.0, 1 - reload_seconds / self._horizon_seconds)
        pays = 1e9 * max(seconds) / float(after) * kept > MIN_GAIN
        return best if pays and best not in self._tried else None


def _fits(num_bytes: int, capacity: Capacity) -> bool:
    return capacity.memory_bytes is None or num_bytes <= capacity.memory_bytes
