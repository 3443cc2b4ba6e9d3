"""The simulator: its clock, its traffic, its workers by hand and by theory, and what policies do in it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts
from graftlm.routing.worker_table import RoutedRequest
from graftlm.simulation.capacity import requests_per_second
from graftlm.simulation.cluster import ClusterPlan, SimulatedCluster, SimulatedRun
from graftlm.simulation.event_queue import EventQueue
from graftlm.simulation.outcome import Objective, Outcome, percentile, summarize
from graftlm.simulation.policies import POLICIES
from graftlm.simulation.traffic import Traffic, arrivals
from graftlm.simulation.worker import SimulatedRequest, SimulatedWorker, WorkerSize

# Binary fractions: sums of them are exact.
COSTS = StepCosts(
    step_seconds=1.0,
    row_seconds=0.25,
    prompt_token_seconds=0.125,
    adapter_seconds=0.5,
    load_seconds=4.0,
    load_byte_seconds=0.0,
)
SIZE = WorkerSize(max_num_seqs=2, max_num_batched_tokens=8, cache_tokens=64, adapter_memory_bytes=20)
OURS = "expected-completion"


class Bench:
    """One worker, to which requests come at given times."""

    def __init__(self, size: WorkerSize = SIZE) -> None:
        self.events = EventQueue()
        self.ended: list[SimulatedRequest] = []
        self.worker = SimulatedWorker(
            "one", size, COSTS, self.events, ended=lambda worker, request: self.ended.append(request)
        )

    def send(self, at: float, *, prompt: int, output: int, adapter: str | None = None) -> SimulatedRequest:
        routed = RoutedRequest(adapter=adapter, adapter_bytes=10, prompt_tokens=prompt, output_tokens=output)
        request = SimulatedRequest(request=routed, arrived=at, output_tokens=output)
        self.events.after(at - self.events.now, lambda: self.worker.take(request))
        return request


def times(request: SimulatedRequest) -> tuple[float | None, float | None, float | None]:
    return request.begun, request.first_token, request.ended


def test_what_happens_at_one_time_happens_in_the_order_in_which_it_was_planned() -> None:
    events, happened = EventQueue(), []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("never", 9.0)):
        events.after(seconds, lambda name=name: happened.append((name, events.now)))
    events.run(5.0)
    assert happened == [("a", 1.0), ("b", 1.0), ("c", 2.0)]
    assert events.now == 5.0


def test_a_request_takes_its_prompts_chunks_and_a_step_for_each_token() -> None:
    bench = Bench()
    # Two chunks, 8 and 4 tokens: 1 + 1 and 1 + 0.5 seconds; then two tokens of 1.25 seconds.
    request = bench.send(0.0, prompt=12, output=3)
    bench.events.run(100.0)
    assert times(request) == (0.0, 3.5, 6.0)


def test_who_comes_in_the_middle_of_a_step_joins_the_next() -> None:
    bench = Bench()
    first = bench.send(0.0, prompt=8, output=11)
    second = bench.send(4.0, prompt=4, output=2)
    third = bench.send(4.0, prompt=8, output=1)
    bench.events.run(100.0)
    # The first has its prompt by 2 and decodes until 4.5; a step of both takes 1.75, one of two rows 1.5.
    assert times(second) == (4.5, 6.25, 7.75)
    # There are two seats: the third begins when the second has gone.
    assert times(third) == (7.75, 7.75 + 1 + 0.25 + 7 * 0.125 + 1 + 0.125 + 0.25, times(third)[1])
    assert first.ended is not None
    assert len(bench.ended) == 3


def test_an_adapter_is_read_beside_the_steps_and_the_longest_unused_goes() -> None:
    bench = Bench()
    a = bench.send(0.0, prompt=4, output=1, adapter="a")
    base = bench.send(0.0, prompt=4, output=1)
    bench.events.run(20.0)
    assert (base.begun, a.begun, a.was_cold) == (0.0, 4.0, True)
    b = bench.send(20.0, prompt=4, output=1, adapter="b")
    bench.events.run(40.0)
    warm = bench.send(40.0, prompt=4, output=1, adapter="a")
    bench.events.run(60.0)
    assert (warm.begun, warm.was_cold, b.was_cold) == (40.0, False, True)
    bench.send(60.0, prompt=4, output=1, adapter="c")
    bench.events.run(80.0)
    assert set(bench.worker.adapters) == {"a", "c"}
    assert bench.worker.num_loads == 3


def test_what_runs_is_not_evicted() -> None:
    bench = Bench(replace(SIZE, adapter_memory_bytes=10))
    long = bench.send(0.0, prompt=4, output=20, adapter="a")
    other = bench.send(5.0, prompt=4, output=1, adapter="b")
    bench.events.run(500.0)
    assert long.ended is not None
    assert other.begun == long.ended + COSTS.load_seconds


def test_a_crash_loses_what_is_there_and_nothing_planned_before_happens_after() -> None:
    bench = Bench()
    request = bench.send(0.0, prompt=8, output=20)
    bench.events.run(7.0)
    # 2 seconds of prompt, then a step each 1.25: what was computed is not told before the steps end.
    assert bench.worker.crash() == [request]
    bench.events.run(100.0)
    assert not bench.ended
    bench.worker.restart()
    assert bench.worker.free_cache_tokens == SIZE.cache_tokens


def test_waits_are_those_of_queueing_theory() -> None:
    """One seat and steps of one length, a random crowd: M/D/1, where the mean wait is known (Pollaczek-Khinchine)."""
    costs = StepCosts(step_seconds=0.1, row_seconds=0, prompt_token_seconds=0, adapter_seconds=0)
    traffic = Traffic(
        requests_per_second=7.0, seconds=4000.0, base_share=1.0, prompt_tokens=1, output_tokens=1, length_sigma=0.0
    )
    plan = ClusterPlan(num_workers=1, num_routers=1, network_seconds=0.0, report_seconds=100.0)
    run = SimulatedCluster(plan, replace(SIZE, max_num_seqs=1), costs, POLICIES["least-queue"]).run(traffic)
    waits = [request.begun - request.arrived for request in run.requests if request.begun is not None]
    used = 7.0 * 0.1
    assert len(waits) == len(run.requests)
    assert statistics.mean(waits) == pytest.approx(used * 0.1 / (2 * (1 - used)), rel=0.05)


def test_traffic_is_what_it_says() -> None:
    traffic = Traffic(requests_per_second=50.0, seconds=200.0, num_adapters=20, burstiness=2.0, base_share=0.2)
    came = list(arrivals(traffic))
    assert came == list(arrivals(traffic))
    assert len(came) == pytest.approx(10_000, rel=0.1)
    gaps = [after.time - before.time for before, after in pairwise(came)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.1)
    counts = Counter(arrival.request.adapter for arrival in came)
    assert counts[None] / len(came) == pytest.approx(0.2, rel=0.1)
    assert counts["adapter-0"] / counts["adapter-9"] == pytest.approx(10, rel=0.3)
    assert statistics.median(arrival.output_tokens for arrival in came) == pytest.approx(traffic.output_tokens, rel=0.1)
    assert all(arrival.request.output_tokens >= arrival.output_tokens for arrival in came)


def test_popularity_moves_on() -> None:
    traffic = Traffic(requests_per_second=100.0, seconds=20.0, num_adapters=50, zipf=2.0, drift_seconds=10.0)
    early, late = (
        Counter(arrival.request.adapter for arrival in arrivals(traffic) if (arrival.time > 10.0) == is_late)
        for is_late in (False, True)
    )
    assert (early.most_common(1)[0][0], late.most_common(1)[0][0]) == ("adapter-0", "adapter-1")


@pytest.mark.parametrize(
    "wrong", [{"requests_per_second": 0}, {"zipf": -1}, {"base_share": 2}, {"seconds": math.inf}, {"burstiness": 0}]
)
def test_traffic_without_meaning_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Traffic(**{"requests_per_second": 1.0, **wrong})  # type: ignore[arg-type]


def run_cluster(policy: str, plan: ClusterPlan, traffic: Traffic, size: WorkerSize | None = None) -> SimulatedRun:
    return SimulatedCluster(plan, size or WorkerSize(), StepCosts(), POLICIES[policy]).run(traffic)


@given(
    policy=st.sampled_from(list(POLICIES)),
    crashes=st.sampled_from([0.0, 20.0]),
    num_workers=st.integers(1, 5),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_with_all_its_tokens(policy: str, crashes: float, num_workers: int, seed: int) -> None:
    plan = ClusterPlan(
        num_workers=num_workers, num_routers=2, mean_seconds_between_crashes=crashes, restart_seconds=2.0, seed=seed
    )
    traffic = Traffic(requests_per_second=2.0 * num_workers, seconds=10.0, num_adapters=40, shared_tokens=32, seed=seed)
    run = run_cluster(policy, plan, traffic)
    assert len(run.requests) == len(list(arrivals(traffic)))
    for request in run.requests:
        assert request.num_outputs == request.output_tokens
        assert request.begun is not None
        assert request.first_token is not None
        assert request.ended is not None
        assert request.arrived < request.begun < request.first_token <= request.ended


def test_crashes_happen_and_are_survived() -> None:
    plan = ClusterPlan(num_workers=4, mean_seconds_between_crashes=10.0, restart_seconds=3.0)
    run = run_cluster(OURS, plan, Traffic(requests_per_second=12.0, seconds=30.0))
    assert run.num_crashes > 5
    assert any(request.num_losses for request in run.requests)


def outcome_of(policy: str, zipf: float, **plan: float) -> Outcome:
    traffic = Traffic(requests_per_second=1.0, seconds=40.0, zipf=zipf)
    rate = 0.7 * 16 * requests_per_second(traffic, WorkerSize(), StepCosts())
    cluster = ClusterPlan(num_workers=16, **plan)  # type: ignore[arg-type]
    run = run_cluster(policy, cluster, replace(traffic, requests_per_second=rate))
    return summarize(run, Objective(), warm_up_seconds=10.0)


@pytest.mark.parametrize("zipf", [0.7, 1.0, 1.5])
def test_waits_are_shorter_than_with_any_other_policy_though_reports_are_old(zipf: float) -> None:
    waits = {name: outcome_of(name, zipf, report_seconds=2.0).wait_p95 for name in POLICIES}
    ours = waits.pop(OURS)
    assert ours < min(waits.values()), waits


def test_old_reports_of_others_are_what_makes_routers_err() -> None:
    """Several routers that hear of each other's requests late do worse than one that knows all."""
    one, many = (
        outcome_of("least-queue", 1.0, num_routers=number, report_seconds=seconds)
        for number, seconds in ((1, 1.0), (16, 5.0))
    )
    assert many.wait_p95 > one.wait_p95


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 21)]
    assert [percentile(values, percent) for percent in (0, 5, 50, 95, 100)] == [1.0, 1.0, 10.0, 19.0, 20.0]


def test_what_was_given_up_counts_as_infinitely_late() -> None:
    request = SimulatedRequest(
        request=RoutedRequest(adapter=None, prompt_tokens=1, output_tokens=1), arrived=5.0, output_tokens=1
    )
    run = SimulatedRun(requests=(request,), num_loads=0, num_crashes=0)
    outcome = summarize(run, Objective(), warm_up_seconds=0.0)
    assert (outcome.attainment, outcome.unfinished, outcome.latency_p50) == (0.0, 1.0, math.inf)
    with pytest.raises(ValueError, match="no request"):
        summarize(run, Objective(), warm_up_seconds=6.0)
