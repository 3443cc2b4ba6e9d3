"""Which layers a worker takes, where a cluster has more of them than one chain. No torch.

What a layer is worth is what limits the requests through it: of the base and of each adapter in demand, the tokens per
second that the layer's holders can compute over those that are asked for, the least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# A move has to raise the bottleneck by this much, and to be the best one in so many checks one after the other.
MIN_GAIN = 1.25
CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class SpanHolder:
    """A worker with layers [start, stop). layers_per_second: tokens times layers. adapters: digests it has."""

    worker_id: str
    start: int
    stop: int
    layers_per_second: float
    adapters: frozenset[str] = frozenset()

    @property
    def tokens_per_second(self) -> float:
        """Of each of its layers, if all are asked for alike."""
        return self.layers_per_second / (self.stop - self.start)

    def holds(self, layer: int) -> bool:
        return self.start <= layer < self.stop


@dataclass(frozen=True, kw_only=True)
class AdapterDemand:
    """Tokens per second that are asked of an adapter, and the layers [start, stop) that it touches."""

    tokens_per_second: float
    start: int
    stop: int


Demands = Mapping[str, AdapterDemand]


@dataclass(frozen=True, kw_only=True)
class SpanMove:
    """A worker leaves its layers for [start, stop)."""

    worker_id: str
    start: int
    stop: int


def layer_values(
    holders: Sequence[SpanHolder], demands: Demands, *, num_layers: int, base_tokens_per_second: float
) -> list[float]:
    """Of each layer, how many times what is asked of it could be computed.

    Args:
        demands: by digest. base_tokens_per_second: asked of the base itself; adapters need it too, and count on top.
    """
    total = base_tokens_per_second + sum(demand.tokens_per_second for demand in demands.values())
    values = []
    for layer in range(num_layers):
        here = [holder for holder in holders if holder.holds(layer)]
        value = _ratio(sum(holder.tokens_per_second for holder in here), total)
        for digest, demand in demands.items():
            if demand.start <= layer < demand.stop:
                able = sum(holder.tokens_per_second for holder in here if digest in holder.adapters)
                value = min(value, _ratio(able, demand.tokens_per_second))
        values.append(value)
    return values


def uncovered(holders: Sequence[SpanHolder], demands: Demands, *, num_layers: int) -> set[tuple[int, str | None]]:
    """Layers without a holder, and adapters in demand without one for a layer that they touch; None is the base."""
    missing: set[tuple[int, str | None]] = set()
    for layer in range(num_layers):
        here = [holder for holder in holders if holder.holds(layer)]
        if not here:
            missing.add((layer, None))
        for digest, demand in demands.items():
            touched = demand.start <= layer < demand.stop and demand.tokens_per_second > 0
            if touched and not any(digest in holder.adapters for holder in here):
                missing.add((layer, digest))
    return missing


def best_start(values: Sequence[float], length: int) -> int:
    """Where a worker that takes so many layers is needed most: the window whose values, the least first, are the
    smallest.

    Source: Petals' block selection, over values that see adapters.
    """
    starts = range(len(values) - length + 1)
    return min(starts, key=lambda start: (sorted(values[start : start + length]), start))


class SpanMover:
    """Proposes one move at a time, and only one that has been the best for `CHECKS` checks.

    Args:
        reload_seconds: in which a worker that moves computes nothing. horizon_seconds: for which a move has to pay.
    """

    def __init__(self, *, num_layers: int, reload_seconds: float, horizon_seconds: float = 600.0) -> None:
        self._num_layers = num_layers
        self._kept = max(0.0, 1 - reload_seconds / horizon_seconds)
        self._candidate: SpanMove | None = None
        self._seen = 0

    def check(
        self, holders: Sequence[SpanHolder], demands: Demands, *, base_tokens_per_second: float
    ) -> SpanMove | None:
        """The move to make now, if there is one."""
        move = self._best(holders, demands, base_tokens_per_second)
        self._seen = self._seen + 1 if move is not None and move == self._candidate else int(move is not None)
        self._candidate = move
        if self._seen < CHECKS:
            return None
        self._candidate, self._seen = None, 0
        return move

    def _best(self, holders: Sequence[SpanHolder], demands: Demands, base: float) -> SpanMove | None:
        def bottleneck(held: Sequence[SpanHolder]) -> float:
            return min(layer_values(held, demands, num_layers=self._num_layers, base_tokens_per_second=base))

        best, least = None, bottleneck(holders) * MIN_GAIN
        floor = uncovered(holders, demands, num_layers=self._num_layers)
        for index, holder in enumerate(holders):
            others = [*holders[:index], *holders[index + 1 :]]
            values = layer_values(others, demands, num_layers=self._num_layers, base_tokens_per_second=base)
            length = holder.stop - holder.start
            start = best_start(values, length)
            moved = [*others, replace(holder, start=start, stop=start + length)]
            # While it reloads it covers nothing, so what nobody else covers stays.
            if not uncovered(others, demands, num_layers=self._num_layers) <= floor:
                continue
            after = bottleneck(moved) * self._kept
            if after > least:
                best, least = SpanMove(worker_id=holder.worker_id, start=start, stop=start + length), after
        return best


def _ratio(able: float, asked: float) -> float:
    return able / asked if asked > 0 else float("inf")
