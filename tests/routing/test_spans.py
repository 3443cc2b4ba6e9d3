"""Which layers each worker of a chain takes: shares that fit speed and memory, and moves that pay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.errors import ConfigurationError
from graftlm.routing.spans import Bounds, Capacity, ChainWeights, SpanMover, best_bounds, stepped_speeds


def chain(layers: Sequence[int], before: int = 0, after: int = 0) -> ChainWeights:
    return ChainWeights(layers=tuple(layers), before=before, after=after)


def shares(weights: ChainWeights, bounds: Bounds) -> list[int]:
    return [weights.of(start, stop) for start, stop in itertools.pairwise(bounds)]


def alike(count: int) -> list[Capacity]:
    return [Capacity(speed=Fraction(1))] * count


def test_equal_layers_are_shared_out_evenly() -> None:
    assert best_bounds(chain([5] * 6), alike(3), memory=chain([1] * 6)) == (0, 2, 4, 6)


def test_who_has_the_head_gets_fewer_layers() -> None:
    assert best_bounds(chain([10] * 6, after=20), alike(2), memory=chain([1] * 6)) == (0, 4, 6)


def test_who_is_three_times_as_fast_gets_three_times_the_layers() -> None:
    capacities = [Capacity(speed=Fraction(1)), Capacity(speed=Fraction(3))]
    assert best_bounds(chain([1] * 8), capacities, memory=chain([1] * 8)) == (0, 2, 8)


def test_more_workers_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more workers than layers; got: 5; allowed: 1 to 4"):
        best_bounds(chain([1] * 4), alike(5), memory=chain([1] * 4))


def test_layers_that_belong_together_are_not_parted() -> None:
    work = replace(chain([5] * 6), boundaries=(1, 2, 4))
    equal = Capacity(speed=Fraction(1))
    assert best_bounds(work, [equal] * 2, memory=work) == (0, 2, 6)
    assert best_bounds(work, [equal] * 3, memory=work) == (0, 2, 4, 6)
    with pytest.raises(ConfigurationError, match=r"stretches of layers: .*; got: 5; allowed: 1 to 4"):
        best_bounds(work, [equal] * 5, memory=work)


def test_too_little_memory_is_refused_with_what_there_is() -> None:
    capacities = [Capacity(speed=Fraction(1), memory_bytes=memory) for memory in (30, 19)]
    with pytest.raises(ConfigurationError, match=r"the memory .*got: 50 bytes in all; allowed: 30, 19 bytes"):
        best_bounds(chain([1] * 5), capacities, memory=chain([10] * 5))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ChainWeights, ChainWeights, list[Capacity]]:
    count = draw(st.integers(1, 7))
    weights = st.lists(st.integers(1, 50), min_size=count, max_size=count)
    work, memory = (chain(draw(weights), draw(st.integers(0, 60)), draw(st.integers(0, 60))) for _ in range(2))
    speeds = st.sampled_from([Fraction(1), Fraction(2, 3), Fraction(4, 9)])
    limits = st.none() | st.integers(0, 250)
    workers = draw(st.lists(st.tuples(speeds, limits), min_size=1, max_size=min(4, count)))
    return work, memory, [Capacity(speed=speed, memory_bytes=limit) for speed, limit in workers]


@given(clusters())
@settings(deadline=None)
def test_no_worker_has_more_than_its_memory_and_no_other_shares_are_faster(
    cluster: tuple[ChainWeights, ChainWeights, list[Capacity]],
) -> None:
    work, memory, capacities = cluster
    num_layers = len(work.layers)
    possible: dict[Bounds, Fraction] = {}
    for cuts in itertools.combinations(range(1, num_layers), len(capacities) - 1):
        bounds = (0, *cuts, num_layers)
        limits = [capacity.memory_bytes for capacity in capacities]
        if all(limit is None or own <= limit for own, limit in zip(shares(memory, bounds), limits, strict=True)):
            times = zip(shares(work, bounds), capacities, strict=True)
            possible[bounds] = max(own / capacity.speed for own, capacity in times)
    if not possible:
        with pytest.raises(ConfigurationError, match="memory"):
            best_bounds(work, capacities, memory=memory)
        return
    chosen = best_bounds(work, capacities, memory=memory)
    assert possible[chosen] == min(possible.values())


@given(st.lists(st.floats(1.0, 1.2), min_size=1, max_size=6))
def test_noise_makes_no_speeds_of_equal_machines(seconds: list[float]) -> None:
    assert stepped_speeds(seconds) == [Fraction(1)] * len(seconds)


def test_speeds_are_rounded_to_steps() -> None:
    assert stepped_speeds([2.0, 1.0, 1.6, 1.9]) == [Fraction(4, 9), Fraction(1), Fraction(2, 3), Fraction(4, 9)]


class Watched:
    """A mover over eight equal layers on two workers, of which the second is `slowness` times as slow."""

    def __init__(self, slowness: float, *, reload_seconds: float = 1.0, limit: int | None = None) -> None:
        self.mover = SpanMover(chain([1] * 8), memory=chain([1] * 8))
        self.slowness = slowness
        self._reload_seconds = reload_seconds
        self._limit = limit
        self.bounds: Bounds = (0, 4, 8)

    def check(self) -> Bounds | None:
        first, second = shares(chain([1] * 8), self.bounds)
        moved = self.mover.check(
            self.bounds,
            [float(first), self.slowness * second],
            reload_seconds=self._reload_seconds,
            memory_bytes=[self._limit, None],
        )
        self.bounds = moved or self.bounds
        return moved


def test_layers_move_when_that_has_paid_three_times() -> None:
    watched = Watched(3.0)
    assert [watched.check() for _ in range(5)] == [None, None, (0, 6, 8), None, None]


def test_a_check_in_between_that_sees_no_gain_begins_the_count_anew() -> None:
    watched = Watched(3.0)
    moves = []
    for slowness in (3.0, 3.0, 1.0, 3.0, 3.0, 3.0):
        watched.slowness = slowness
        moves.append(watched.check())
    assert moves == [None] * 5 + [(0, 6, 8)]


@pytest.mark.parametrize(
    "watched",
    [
        # Six layers against five and a half.
        Watched(1.2),
        # Two thirds of the horizon are spent reloading.
        Watched(3.0, reload_seconds=400.0),
        # The first has no room for a fifth layer.
        Watched(3.0, limit=4),
    ],
    ids=["little gain", "long reload", "no memory"],
)
def test_layers_stay_where_a_move_does_not_pay(watched: Watched) -> None:
    assert not any(watched.check() for _ in range(6))


def test_what_was_tried_is_not_tried_again_until_others_come() -> None:
    """Whichever worker has more layers is said to be the slow one, as if times had nothing to do with layers."""
    mover = SpanMover(chain([1] * 8), memory=chain([1] * 8))
    bounds: Bounds = (0, 4, 8)
    moves = []

    def run(num_checks: int) -> None:
        nonlocal bounds
        for _ in range(num_checks):
            seconds = [9.0, 1.0] if bounds[1] >= 4 else [1.0, 9.0]
            moved = mover.check(bounds, seconds, reload_seconds=0.0, memory_bytes=[None, None])
            if moved is not None:
                moves.append(moved)
                bounds = moved

    run(60)
    assert 0 < len(moves) == len(set(moves)) < 8
    run(20)
    num_moves = len(moves)
    mover.forget()
    run(3)
    assert len(moves) == num_moves + 1
