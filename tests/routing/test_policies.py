"""Which worker each policy takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graftlm.errors import ConfigurationError
from graftlm.routing.comparison import HolderAffinity, HolderFilter, LeastQueue
from graftlm.routing.costs import StepCosts
from graftlm.routing.expected_completion import ExpectedCompletion
from graftlm.routing.homes import AdapterHomes
from graftlm.routing.policy import RoutingPolicy
from graftlm.routing.prefix_index import PrefixIndex, prefix_of
from graftlm.routing.worker_table import RoutedRequest, WorkerReport, WorkerTable

COSTS = StepCosts(
    step_seconds=0.1,
    row_seconds=0.01,
    prompt_token_seconds=0.001,
    adapter_seconds=0.0,
    load_seconds=0.5,
    load_byte_seconds=0.0,
)
IDLE = WorkerReport(free_cache_tokens=10_000, free_adapter_bytes=1000, costs=COSTS)
HOLDING = replace(IDLE, adapters=frozenset("a"))
REQUEST = RoutedRequest(adapter="a", adapter_bytes=10, prompt_tokens=100, output_tokens=10)


def table_of(**reports: WorkerReport) -> WorkerTable:
    table = WorkerTable()
    for name, report in reports.items():
        table.join(name, report, max_num_seqs=4)
    return table


def ours(**options: int) -> ExpectedCompletion:
    return ExpectedCompletion(clock=lambda: 0.0, homes=AdapterHomes(), prefixes=PrefixIndex(), **options)


def busy(num_requests: int, report: WorkerReport = HOLDING) -> WorkerReport:
    return replace(report, num_requests=num_requests)


def test_an_idle_holder_is_preferred() -> None:
    assert ours().choose(REQUEST, table_of(other=IDLE, holder=HOLDING)) == "holder"


def test_a_holder_with_a_long_queue_is_left_for_a_load_elsewhere() -> None:
    policy = ours()
    assert policy.choose(REQUEST, table_of(other=IDLE, holder=busy(2))) == "holder"
    assert policy.choose(REQUEST, table_of(other=IDLE, holder=busy(30))) == "other"


def test_a_base_request_goes_to_the_least_busy() -> None:
    base = replace(REQUEST, adapter=None)
    assert ours().choose(base, table_of(one=busy(3), two=busy(1), three=busy(2))) == "two"


def test_a_missing_adapter_goes_to_its_home() -> None:
    names = [f"worker-{index}" for index in range(6)]
    homes = AdapterHomes()
    homes.set_workers(names)
    table = table_of(**dict.fromkeys(names, IDLE))
    assert ours().choose(REQUEST, table) == homes.homes("a", 0.0)[0]


def test_a_first_copy_does_not_wait_for_its_home_and_a_second_one_does() -> None:
    """It is as good elsewhere; another copy would take the room of another adapter."""
    names = [f"worker-{index}" for index in range(6)]
    homes = AdapterHomes()
    homes.set_workers(names)
    home = homes.homes("a", 0.0)[0]
    table = {name: replace(IDLE, num_loading=1 if name == home else 0) for name in names}
    policy = ours()
    for other in "bcdefghijklmnop":
        # One of many has no more than one home.
        policy.choose(replace(REQUEST, adapter=other), table_of(**table))
    elsewhere = policy.choose(REQUEST, table_of(**table))
    assert elsewhere != home
    assert policy.choose(REQUEST, table_of(**{**table, elsewhere: busy(7)})) == home


def test_a_worker_that_is_reading_other_adapters_is_avoided() -> None:
    policy, view = ours(), table_of(one=IDLE).get("one")
    reading = table_of(one=replace(IDLE, num_loading=3)).get("one")
    more = policy.seconds(REQUEST, reading) - policy.seconds(REQUEST, view)
    assert more == pytest.approx(3 * COSTS.load_seconds)


def test_a_slow_worker_gets_less() -> None:
    slow = replace(IDLE, costs=replace(COSTS, step_seconds=3 * COSTS.step_seconds))
    table, request = table_of(slow=slow, fast=IDLE), replace(REQUEST, adapter=None)
    for _ in range(8):
        table.sent(ours().choose(request, table), request)
    assert table.get("slow").num_requests < table.get("fast").num_requests


def test_a_worker_whose_cache_is_full_is_avoided() -> None:
    full = replace(HOLDING, free_cache_tokens=0)
    assert ours().choose(REQUEST, table_of(full=full, free=HOLDING)) == "free"


def test_a_worker_that_must_evict_an_adapter_is_avoided() -> None:
    policy = ours()
    full, free = (table_of(one=replace(IDLE, free_adapter_bytes=size)).get("one") for size in (0, 1000))
    assert policy.seconds(REQUEST, full) > policy.seconds(REQUEST, free)


def test_a_prompt_goes_where_its_beginning_went() -> None:
    prefix = prefix_of(list(range(96)), scope="", block_size=16)
    assert len(prefix) == 6
    request = replace(REQUEST, adapter=None, prefix=prefix)
    policy, table = ours(), table_of(one=IDLE, two=IDLE, three=IDLE)
    first = policy.choose(request, table)
    assert {policy.choose(request, table) for _ in range(20)} == {first}


def test_a_prefix_is_of_its_scope_and_of_all_that_is_before() -> None:
    ids = list(range(40))
    chain = prefix_of(ids, scope="a", block_size=16)
    assert chain == prefix_of(ids[:32], scope="a", block_size=16)
    assert not set(chain) & set(prefix_of(ids, scope="b", block_size=16))
    assert not set(chain) & set(prefix_of([7, *ids[1:]], scope="a", block_size=16))


def test_the_longest_unused_prefixes_are_forgotten() -> None:
    index = PrefixIndex(max_blocks=4)
    index.record("one", (1, 2, 3))
    index.record("one", (4, 5, 6))
    assert index.num_cached("one", (4, 5, 6)) == 3
    # What is left of a chain is its beginning.
    assert index.num_cached("one", (1, 2, 3)) == 1
    index.forget("one")
    assert index.num_cached("one", (4, 5, 6)) == 0


def test_among_many_workers_holders_are_still_found() -> None:
    reports = {f"worker-{index}": IDLE for index in range(500)}
    table = table_of(**{**reports, "worker-77": HOLDING})
    policy = ours(sample=4)
    assert {policy.choose(REQUEST, table) for _ in range(10)} == {"worker-77"}


def test_r111_two_adapters_on_two_workers_with_room_for_one_each_stay_where_they_are() -> None:
    """R111: loads are counted as a worker would do them, and one of the workers is lost on the way."""
    policy, sizes = ours(), {name: replace(REQUEST, adapter=name, adapter_bytes=10) for name in "ab"}
    held: dict[str, str | None] = {"one": None, "two": None}
    table, num_loads = WorkerTable(), 0
    empty = replace(IDLE, free_adapter_bytes=10)
    for name in held:
        table.join(name, empty, max_num_seqs=4)
    for turn in range(40):
        if turn == 20:
            table.leave("one")
            table.join("three", empty, max_num_seqs=4)
            del held["one"]
            held["three"] = None
        request = sizes["ab"[turn % 2]]
        chosen = policy.choose(request, table)
        table.sent(chosen, request)
        num_loads += held[chosen] != request.adapter
        held[chosen] = request.adapter
        table.ended(chosen)
        view = table.get(chosen)
        holding = frozenset(filter(None, [request.adapter]))
        report = replace(empty, adapters=holding, free_adapter_bytes=0, num_accepted=view.num_sent)
        table.report(chosen, replace(report, num_ended=view.num_ended))
    assert num_loads <= 4


def test_a_burst_between_two_reports_is_spread() -> None:
    """No report comes in between: what was sent counts at once."""
    table = table_of(**{f"worker-{index}": IDLE for index in range(4)})
    policy = ours()
    for _ in range(40):
        request = replace(REQUEST, adapter=None)
        table.sent(policy.choose(request, table), request)
    assert {view.num_requests for view in table.workers} == {10}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(LeastQueue(), "other"), (HolderFilter(), "holder"), (HolderAffinity(max_ongoing=40), "holder")],
)
def test_policies_of_others_look_at_one_thing(policy: RoutingPolicy, expected: str) -> None:
    assert policy.choose(REQUEST, table_of(other=IDLE, holder=busy(30))) == expected


def test_affinity_leaves_holders_that_take_no_more_for_those_with_the_fewest_adapters() -> None:
    many = replace(IDLE, adapters=frozenset("bcd"))
    assert HolderAffinity(max_ongoing=5).choose(REQUEST, table_of(holder=busy(5), many=many, few=IDLE)) == "few"


@pytest.mark.parametrize("policy", [LeastQueue(), HolderFilter(), HolderAffinity(), ours()])
def test_every_policy_chooses_when_all_are_full(policy: RoutingPolicy) -> None:
    table = table_of(one=busy(1000, replace(IDLE, free_cache_tokens=-5)))
    assert policy.choose(REQUEST, table) == "one"
    assert policy.choose(replace(REQUEST, adapter=None), table) == "one"


@pytest.mark.parametrize("costs", [{"row_seconds": -1.0}, {"load_seconds": float("nan")}])
def test_costs_that_are_no_times_are_refused(costs: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(costs))):
        StepCosts(**costs)


def test_a_step_takes_time() -> None:
    with pytest.raises(ConfigurationError, match="takes no time"):
        StepCosts(step_seconds=0, row_seconds=0)
