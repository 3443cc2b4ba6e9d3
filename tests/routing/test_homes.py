"""Homes of adapters: in proportion to demand, stable when workers come and go, slow to shrink."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graftlm.routing.homes import AdapterHomes

WORKERS = [f"worker-{index}" for index in range(20)]
ADAPTERS = [f"adapter-{index}" for index in range(50)]


def homes_of(workers: list[str]) -> AdapterHomes:
    homes = AdapterHomes(headroom=1.0, half_life_seconds=10.0)
    homes.set_workers(workers)
    return homes


def test_homes_are_in_proportion_to_demand_and_never_none() -> None:
    homes = homes_of(WORKERS)
    for adapter, count in (("hot", 70), ("warm", 25), ("cold", 5)):
        for _ in range(count):
            homes.asked_for(adapter, 0.0)
    assert [len(homes.homes(name, 0.0)) for name in ("hot", "warm", "cold", "unheard")] == [14, 5, 1, 1]


def test_adapters_are_spread_over_all_workers() -> None:
    homes = homes_of(WORKERS)
    used = {homes.homes(adapter, 0.0)[0] for adapter in ADAPTERS}
    assert len(used) > len(WORKERS) / 2


@given(st.sampled_from(WORKERS))
def test_a_worker_that_leaves_moves_its_own_adapters_only(gone: str) -> None:
    before, after = homes_of(WORKERS), homes_of([name for name in WORKERS if name != gone])
    for adapter in ADAPTERS:
        was, now = before.homes(adapter, 0.0), after.homes(adapter, 0.0)
        assert now == was or was == (gone,)
        assert gone not in now


def test_homes_come_at_once_and_go_one_by_one() -> None:
    homes = homes_of(WORKERS)
    for _ in range(10):
        homes.asked_for("hot", 0.0)
    assert len(homes.homes("hot", 0.0)) == 20
    for _ in range(30):
        homes.asked_for("other", 1.0)
    assert len(homes.homes("hot", 1.0)) == 20
    assert [len(homes.homes("hot", now)) for now in (9.0, 11.0, 12.0, 22.0)] == [20, 19, 19, 18]


def test_demand_fades() -> None:
    homes = homes_of(WORKERS)
    for _ in range(100):
        homes.asked_for("old", 0.0)
    homes.asked_for("new", 200.0)
    assert homes.share("new") > 0.9


def test_a_forgotten_adapter_leaves_its_share_to_the_others() -> None:
    homes = homes_of(WORKERS)
    homes.asked_for("a", 0.0)
    homes.asked_for("b", 0.0)
    homes.forget("a")
    homes.forget("unheard")
    assert (homes.share("a"), homes.share("b")) == (0.0, 1.0)
