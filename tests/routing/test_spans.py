"""Where workers' layers go: to the weakest layers, with adapters counted, and never so that something has no holder."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.routing.spans import (
    AdapterDemand,
    SpanHolder,
    SpanMove,
    SpanMover,
    best_start,
    layer_values,
    uncovered,
)

NUM_LAYERS = 6


def holder(name: str, start: int, stop: int, adapters: str = "", speed: float = 30.0) -> SpanHolder:
    return SpanHolder(worker_id=name, start=start, stop=stop, layers_per_second=speed, adapters=frozenset(adapters))


def values(holders: list[SpanHolder], demands: dict[str, AdapterDemand], base: float = 10.0) -> list[float]:
    return layer_values(holders, demands, num_layers=NUM_LAYERS, base_tokens_per_second=base)


def test_a_layer_is_worth_what_its_scarcest_adapter_gets() -> None:
    holders = [holder("x", 0, 3, "a"), holder("y", 3, 6), holder("z", 3, 6, "a", speed=15)]
    demand = {"a": AdapterDemand(tokens_per_second=10, start=0, stop=NUM_LAYERS)}
    assert values(holders, {}) == [1, 1, 1, 1.5, 1.5, 1.5]
    # 20 tokens a second need the base; of the last layers only 5 a second are for the adapter.
    assert values(holders, demand) == [0.5] * 6
    assert values([replace(each, adapters=frozenset("a")) for each in holders], demand) == [0.5] * 3 + [0.75] * 3


def test_layers_that_an_adapter_does_not_touch_do_not_need_it() -> None:
    holders = [holder("x", 0, 3, "a"), holder("y", 3, 6)]
    assert not uncovered(holders, {"a": AdapterDemand(tokens_per_second=1, start=0, stop=3)}, num_layers=NUM_LAYERS)
    missing = uncovered(holders, {"a": AdapterDemand(tokens_per_second=1, start=0, stop=4)}, num_layers=NUM_LAYERS)
    assert missing == {(3, "a")}


def test_who_joins_takes_the_weakest_layers() -> None:
    assert best_start([3, 3, 1, 2, 1, 3], 2) == 2
    assert best_start([1, 1, 1], 3) == 0


def test_a_move_is_made_when_it_was_the_best_three_times() -> None:
    holders = [holder("x", 0, 3), holder("y", 0, 3), holder("z", 0, 3), holder("w", 3, 6)]
    mover = SpanMover(num_layers=NUM_LAYERS, reload_seconds=10)
    moves = [mover.check(holders, {}, base_tokens_per_second=10) for _ in range(4)]
    assert moves == [None, None, SpanMove(worker_id="x", start=3, stop=6), None]


def test_a_move_whose_gain_the_reload_eats_is_not_made() -> None:
    holders = [holder("x", 0, 3), holder("y", 0, 3), holder("z", 0, 3), holder("w", 3, 6)]
    mover = SpanMover(num_layers=NUM_LAYERS, reload_seconds=300, horizon_seconds=600)
    assert not any(mover.check(holders, {}, base_tokens_per_second=10) for _ in range(5))


def test_the_only_holder_of_an_adapter_stays_though_its_layers_are_strong() -> None:
    demand = {"a": AdapterDemand(tokens_per_second=1, start=0, stop=3)}
    holders = [holder("x", 0, 3, "a"), holder("y", 0, 3), holder("z", 0, 3), holder("w", 3, 6)]
    mover = SpanMover(num_layers=NUM_LAYERS, reload_seconds=10)
    moves = [mover.check(holders, demand, base_tokens_per_second=10) for _ in range(3)]
    assert moves[-1] is not None
    assert moves[-1].worker_id == "y"


@st.composite
def clusters(draw: st.DrawFn) -> list[SpanHolder]:
    spans = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.frozensets(st.sampled_from("ab")))))
    made = [
        SpanHolder(worker_id=str(index), start=start, stop=start + length, layers_per_second=10.0, adapters=adapters)
        for index, (start, length, adapters) in enumerate(spans)
    ]
    return [*made, holder("all", 0, NUM_LAYERS, "ab")]


@given(clusters(), st.lists(st.integers(0, 30), max_size=5))
@settings(deadline=None, max_examples=60)
def test_whatever_moves_and_leaves_nothing_in_demand_loses_its_last_holder_by_a_move(
    holders: list[SpanHolder], leaving: list[int]
) -> None:
    demands = {
        "a": AdapterDemand(tokens_per_second=5, start=0, stop=NUM_LAYERS),
        "b": AdapterDemand(tokens_per_second=1, start=2, stop=4),
    }
    mover = SpanMover(num_layers=NUM_LAYERS, reload_seconds=1)
    for index in leaving:
        before = uncovered(holders, demands, num_layers=NUM_LAYERS)
        for _ in range(3):
            move = mover.check(holders, demands, base_tokens_per_second=5)
            if move is not None:
                holders = [
                    replace(each, start=move.start, stop=move.stop) if each.worker_id == move.worker_id else each
                    for each in holders
                ]
        assert uncovered(holders, demands, num_layers=NUM_LAYERS) <= before
        if len(holders) > 1:
            holders = [each for position, each in enumerate(holders) if position != index % len(holders)]
