"""Does the simulator predict what a real cluster does? Ray actors that sleep instead of computing, behind the same
policies, with the same requests; and which policy keeps waits short there.

The actors are written for this: they share the simulator's description of a step, and none of its code.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from benchmarks.results import conditions, write_section
from graftlm.routing.costs import StepCosts
from graftlm.routing.policy import RoutingPolicy
from graftlm.routing.worker_table import RoutedRequest, WorkerReport, WorkerTable
from graftlm.simulation.cluster import ClusterPlan, MakePolicy, SimulatedCluster
from graftlm.simulation.outcome import percentile
from graftlm.simulation.policies import POLICIES
from graftlm.simulation.traffic import Traffic, arrivals
from graftlm.simulation.worker import WorkerSize

NUM_WORKERS = 4
REPORT_SECONDS = 1.0
# Long enough for a busy machine's hiccups to be small beside them.
COSTS = StepCosts(
    step_seconds=0.2,
    row_seconds=0.012,
    prompt_token_seconds=0.004,
    adapter_seconds=0.012,
    load_seconds=1.0,
    load_byte_seconds=0.0,
)
# Simulations of each row, with other random choices: policies that choose at random have more than one outcome.
NUM_SIMULATIONS = 9
SIZE = WorkerSize(max_num_seqs=8, adapter_memory_bytes=160_000_000)
ZIPFS = (0.7, 1.0, 1.5)
FIGURES = ("wait p50", "wait p95", "first token p50", "first token p95", "latency p50", "latency p95")


@dataclass(kw_only=True, eq=False)
class Sleeper:
    """A request in an actor. Times are of the actor's clock."""

    number: int
    request: RoutedRequest
    left: int
    prompt: int
    came: float
    begun: float | None = None
    first: float | None = None


class SleepingWorker:
    """An engine without a model: admits, reads adapters and steps, by sleeping."""

    def __init__(self) -> None:
        self._waiting: list[Sleeper] = []
        self._running: list[Sleeper] = []
        self._adapters: OrderedDict[str, int] = OrderedDict()
        self._to_read: list[str] = []
        self._free_bytes = SIZE.adapter_memory_bytes
        self._ended: list[tuple[int, float, float]] = []
        self._accepted = self._num_ended = 0
        self._work, self._reads, self._news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks = [asyncio.create_task(self._step_on()), asyncio.create_task(self._read_on())]

    async def start(self) -> None:
        return None

    async def submit(self, number: int, request: RoutedRequest, output_tokens: int) -> None:
        self._accepted += 1
        self._waiting.append(
            Sleeper(
                number=number,
                request=request,
                left=output_tokens,
                prompt=request.prompt_tokens,
                came=time.perf_counter(),
            )
        )
        self._work.set()

    async def poll(self) -> tuple[list[tuple[int, float, float]], WorkerReport]:
        """Requests that ended, with the seconds from their coming to their first step and to their first token."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), REPORT_SECONDS)
        self._news.clear()
        ended, self._ended = self._ended, []
        return ended, WorkerReport(
            num_requests=len(self._running) + len(self._waiting),
            pending_prompt_tokens=sum(each.prompt for each in (*self._running, *self._waiting)),
            adapters=frozenset((*self._adapters, *self._to_read)),
            num_loading=len(self._to_read),
            free_cache_tokens=SIZE.cache_tokens,
            free_adapter_bytes=self._free_bytes,
            costs=COSTS,
            num_accepted=self._accepted,
            num_ended=self._num_ended,
        )

    async def _step_on(self) -> None:
        while True:
            self._admit()
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            decoding = [each for each in self._running if not each.prompt]
            budget, chunks = SIZE.max_num_batched_tokens - len(decoding), []
            for each in self._running:
                if each.prompt and budget:
                    chunks.append((each, min(budget, each.prompt)))
                    budget -= chunks[-1][1]
                    each.begun = each.begun or time.perf_counter()
            active = {each.request.adapter for each in (*decoding, *(each for each, _ in chunks))}
            tokens = sum(chunk for _, chunk in chunks)
            await asyncio.sleep(COSTS.step(rows=len(decoding), prompt_tokens=tokens, adapters=len(active - {None})))
            for each in decoding:
                each.left -= 1
            for each, chunk in chunks:
                each.prompt -= chunk
                if not each.prompt:
                    each.left -= 1
                    each.first = time.perf_counter()
            for each in [each for each in self._running if each.left <= 0]:
                assert each.begun is not None
                assert each.first is not None
                self._running.remove(each)
                self._num_ended += 1
                self._ended.append((each.number, each.begun - each.came, each.first - each.came))
                self._news.set()

    def _admit(self) -> None:
        still = []
        for each in self._waiting:
            adapter = each.request.adapter
            if len(self._running) == SIZE.max_num_seqs:
                still.append(each)
            elif adapter is None or adapter in self._adapters:
                if adapter is not None:
                    self._adapters.move_to_end(adapter)
                self._running.append(each)
            else:
                still.append(each)
                self._want(adapter, each.request.adapter_bytes)
        self._waiting = still

    def _want(self, adapter: str, num_bytes: int) -> None:
        if adapter in self._to_read:
            return
        used = {each.request.adapter for each in self._running}
        for other in [other for other in self._adapters if other not in used]:
            if self._free_bytes >= num_bytes:
                break
            self._free_bytes += self._adapters.pop(other)
        if self._free_bytes >= num_bytes:
            self._free_bytes -= num_bytes
            self._to_read.append(adapter)
            self._reads.set()

    async def _read_on(self) -> None:
        while True:
            if not self._to_read:
                self._reads.clear()
                await self._reads.wait()
            await asyncio.sleep(COSTS.load(0))
            adapter = self._to_read.pop(0)
            self._adapters[adapter] = 10_000_000
            self._work.set()


@dataclass(kw_only=True)
class Times:
    """Seconds from each request's arrival at the router, those of the beginning left out."""

    wait: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)

    def figures(self) -> list[float]:
        return [
            percentile(sorted(times), percent)
            for times in (self.wait, self.first_token, self.latency)
            for percent in (50, 95)
        ]


async def measure(policy: RoutingPolicy, traffic: Traffic, warm_up: float) -> Times:
    """Send the traffic through a policy to actors that sleep."""
    actor_class = ray.remote(SleepingWorker).options(num_cpus=0, max_restarts=0)
    actors: dict[str, Any] = {f"worker-{index}": actor_class.remote() for index in range(NUM_WORKERS)}
    await asyncio.gather(*(actor.start.remote() for actor in actors.values()))
    table, times = WorkerTable(), Times()
    sent: dict[int, tuple[float, float]] = {}
    all_sent, all_ended = asyncio.Event(), asyncio.Event()
    for name, actor in actors.items():
        _, report = await actor.poll.remote()
        table.join(name, report, max_num_seqs=SIZE.max_num_seqs)

    async def listen(name: str, actor: Any) -> None:
        reported = time.perf_counter()
        while True:
            ended, report = await actor.poll.remote()
            now = time.perf_counter()
            if now - reported >= REPORT_SECONDS:
                table.report(name, report)
                reported = now
            for number, begun, first in ended:
                arrival, at = sent.pop(number)
                table.ended(name)
                if arrival >= warm_up:
                    times.wait.append(begun)
                    times.first_token.append(first)
                    times.latency.append(now - at)
            if all_sent.is_set() and not sent:
                all_ended.set()

    listeners = [asyncio.create_task(listen(name, actor)) for name, actor in actors.items()]
    begun = time.perf_counter()
    for number, arrival in enumerate(arrivals(traffic)):
        await asyncio.sleep(max(0.0, begun + arrival.time - time.perf_counter()))
        chosen = policy.choose(arrival.request, table)
        table.sent(chosen, arrival.request)
        sent[number] = (arrival.time, time.perf_counter())
        actors[chosen].submit.remote(number, arrival.request, arrival.output_tokens)
    all_sent.set()
    await all_ended.wait()
    for listener in listeners:
        listener.cancel()
    for actor in actors.values():
        ray.kill(actor)
    return times


async def measure_all(traffic: Traffic, warm_up: float) -> dict[str, Times]:
    """Every policy with actors of its own, at the same time: they sleep."""
    policies = {name: make(time.perf_counter, 0) for name, make in POLICIES.items()}
    times = await asyncio.gather(*(measure(policy, traffic, warm_up) for policy in policies.values()))
    return dict(zip(policies, times, strict=True))


def predict(name: str, traffic: Traffic, warm_up: float) -> list[float]:
    """The same figures by the simulator: their medians over several simulations."""
    runs = [simulate(POLICIES[name], traffic, warm_up, seed).figures() for seed in range(NUM_SIMULATIONS)]
    return [statistics.median(values) for values in zip(*runs, strict=True)]


def simulate(make: MakePolicy, traffic: Traffic, warm_up: float, seed: int) -> Times:
    """One simulation. seed: of the policy's choices."""
    plan = ClusterPlan(num_workers=NUM_WORKERS, num_routers=1, report_seconds=REPORT_SECONDS)
    run = SimulatedCluster(plan, SIZE, COSTS, lambda clock, _: make(clock, seed)).run(traffic)
    times = Times()
    for request in run.requests:
        if request.arrived >= warm_up:
            assert request.begun is not None
            assert request.first_token is not None
            assert request.ended is not None
            times.wait.append(request.begun - request.arrived)
            times.first_token.append(request.first_token - request.arrived)
            times.latency.append(request.ended - request.arrived)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="in which requests come, for each row")
    parser.add_argument("--load", type=float, default=2.6, help="requests per second")
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    ray.init(address="local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    lines, errors = [], []
    warm_up = options.seconds / 4
    for zipf in ZIPFS:
        traffic = Traffic(
            requests_per_second=options.load,
            seconds=options.seconds,
            num_adapters=25 * NUM_WORKERS,
            zipf=zipf,
            prompt_tokens=48,
            output_tokens=16,
        )
        for name, times in asyncio.run(measure_all(traffic, warm_up)).items():
            measured, predicted = times.figures(), predict(name, traffic, warm_up)
            off = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
            errors.append(off)
            shown = [f"{m:.3f} / {p:.3f} ({e:+.0%})" for m, p, e in zip(measured, predicted, off, strict=True)]
            lines.append(f"| {zipf:g} | {name} | " + " | ".join(shown) + " |")
            print(lines[-1], flush=True)
    ray.shutdown()
    worst = [max(abs(each[index]) for each in errors) for index in range(len(FIGURES))]
    typical = [statistics.median(abs(each[index]) for each in errors) for index in range(len(FIGURES))]
    body = "\n".join(
        [
            f"{NUM_WORKERS} Ray actors that sleep for as long as a step would take, one router, reports every "
            f"{REPORT_SECONDS:g} s, {options.load:g} requests a second for {options.seconds:g} s, "
            f"{25 * NUM_WORKERS} adapters and room for {SIZE.adapter_memory_bytes // 10_000_000} in each worker. "
            f"Seconds: measured / predicted (error); predictions are medians of {NUM_SIMULATIONS}. {conditions()}.",
            "",
            "| Zipf | policy | " + " | ".join(FIGURES) + " |",
            "| --- " * (2 + len(FIGURES)) + "|",
            *lines,
            "| | median error | " + " | ".join(f"{error:.0%}" for error in typical) + " |",
            "| | largest error | " + " | ".join(f"{error:.0%}" for error in worst) + " |",
        ]
    )
    print(body)
    if options.write:
        write_section("Simulator beside sleeping Ray actors (`python -m benchmarks.simulator_validation`)", body)


if __name__ == "__main__":
    main()
