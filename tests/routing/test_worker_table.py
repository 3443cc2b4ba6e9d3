"""What a router knows at once, what it learns from reports, and what old reports must not undo."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from graftlm.routing.costs import StepCosts
from graftlm.routing.worker_table import RoutedRequest, WorkerReport, WorkerTable

IDLE = WorkerReport(free_cache_tokens=1000, free_adapter_bytes=100, costs=StepCosts())
REQUEST = RoutedRequest(adapter="a", adapter_bytes=10, prompt_tokens=20, output_tokens=5)


def table_of(*names: str) -> WorkerTable:
    table = WorkerTable()
    for name in names:
        table.join(name, IDLE, max_num_seqs=4)
    return table


def test_what_was_sent_counts_before_any_report() -> None:
    table = table_of("one")
    table.sent("one", REQUEST)
    view = table.get("one")
    assert (view.num_requests, view.pending_prompt_tokens, view.num_loading) == (1, 20, 1)
    assert (view.free_cache_tokens, view.free_adapter_bytes) == (975, 90)
    assert not view.lacks("a")
    assert [holder.id for holder in table.holders("a")] == ["one"]


def test_a_second_request_for_an_adapter_loads_nothing_more() -> None:
    table = table_of("one")
    table.sent("one", REQUEST)
    table.sent("one", REQUEST)
    view = table.get("one")
    assert (view.num_requests, view.num_loading, view.free_adapter_bytes) == (2, 1, 90)


def test_an_old_report_does_not_hide_what_was_sent_since() -> None:
    table = table_of("one")
    table.sent("one", REQUEST)
    table.sent("one", REQUEST)
    table.report("one", replace(IDLE, num_requests=1, adapters=frozenset("a"), num_accepted=1))
    assert table.get("one").num_requests == 2
    table.report("one", replace(IDLE, num_requests=2, adapters=frozenset("a"), num_accepted=2))
    assert table.get("one").num_requests == 2


def test_a_report_of_before_a_request_ended_does_not_bring_it_back() -> None:
    table = table_of("one")
    table.sent("one", REQUEST)
    table.ended("one")
    table.report("one", replace(IDLE, num_requests=1, num_accepted=1, num_ended=0))
    assert table.get("one").num_requests == 0


def test_an_adapter_that_a_worker_evicted_is_missing_there() -> None:
    table = table_of("one", "two")
    table.sent("one", REQUEST)
    table.report("one", replace(IDLE, num_accepted=1, adapters=frozenset("b")))
    assert table.get("one").lacks("a")
    assert not table.holders("a")
    assert [holder.id for holder in table.holders("b")] == ["one"]


def test_a_worker_that_left_is_forgotten() -> None:
    table = table_of("one", "two")
    table.sent("one", REQUEST)
    table.leave("one")
    table.report("one", IDLE)
    table.ended("one")
    assert [view.id for view in table.workers] == ["two"]
    assert not table.holders("a")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "report", "sent"]),
            st.sampled_from(["one", "two", "three"]),
            st.frozensets(st.sampled_from("abc")),
        )
    )
)
def test_holders_are_always_those_whose_views_hold(events: list[tuple[str, str, frozenset[str]]]) -> None:
    table = WorkerTable()
    for what, name, adapters in events:
        known = {view.id for view in table.workers}
        report = replace(IDLE, adapters=adapters)
        if what == "join":
            table.join(name, report, max_num_seqs=4)
        elif what == "leave":
            table.leave(name)
        elif what == "report":
            table.report(name, report)
        elif name in known:
            table.sent(name, replace(REQUEST, adapter=min(adapters, default=None)))
        for adapter in "abc":
            expected = {view.id for view in table.workers if adapter in view.adapters}
            assert {view.id for view in table.holders(adapter)} == expected
