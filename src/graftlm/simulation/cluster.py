"""A simulated cluster: routers with old reports, workers that crash, and what becomes of each request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts
from graftlm.routing.policy import RoutingPolicy
from graftlm.routing.worker_table import WorkerReport, WorkerTable
from graftlm.simulation.event_queue import EventQueue
from graftlm.simulation.traffic import Traffic, arrivals
from graftlm.simulation.worker import SimulatedRequest, SimulatedWorker, WorkerSize

# Makes a router's policy, given the clock and a seed.
MakePolicy = Callable[[Callable[[], float], int], RoutingPolicy]
# Requests that have not ended this long after the last one came are given up: the queue grows without end.
DRAIN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What a simulated cluster consists of.

    Args:
        num_workers: whole engines.
        num_routers: in front of them, each of which knows only what it sent itself and what workers report.
        report_seconds: between two reports of a worker.
        network_seconds: on the way from a router to a worker, and back.
        speed_spread: the slowest worker's steps take this part longer than the fastest's.
        mean_seconds_between_crashes: of one worker; 0 is never.
        restart_seconds: until a worker that crashed is there again.
        detection_seconds: until routers know of a crash.
        seed: of the workers' speeds and crashes.

    Raises:
        ConfigurationError: a number has no meaning.
    """

    num_workers: int = 16
    num_routers: int = 4
    report_seconds: float = 1.0
    network_seconds: float = 0.001
    speed_spread: float = 0.0
    mean_seconds_between_crashes: float = 0.0
    restart_seconds: float = 10.0
    detection_seconds: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name in {"num_workers", "num_routers", "report_seconds"}):
                raise ConfigurationError(f"{name} is out of range", got=value)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """requests: all that came, in their order. num_loads: adapters that were read. num_crashes: of workers."""

    requests: tuple[SimulatedRequest, ...]
    num_loads: int
    num_crashes: int


@dataclass(kw_only=True, eq=False)
class _Router:
    policy: RoutingPolicy
    table: WorkerTable = field(default_factory=WorkerTable)


@dataclass(kw_only=True, eq=False)
class _Seat:
    """A worker, and what each router has sent to it since it started. lives: how often it has."""

    worker: SimulatedWorker
    accepted: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    lives: int = 1


class SimulatedCluster:
    """Routers, workers, and the network between them.

    Args:
        costs: of the fastest worker.
    """

    def __init__(self, plan: ClusterPlan, size: WorkerSize, costs: StepCosts, make_policy: MakePolicy) -> None:
        self._plan = plan
        self._events = EventQueue()
        self._random = random.Random(plan.seed)
        self._num_crashes = 0
        self._router_of: dict[SimulatedRequest, int] = {}
        self._homeless: list[SimulatedRequest] = []
        self._requests: list[SimulatedRequest] = []
        self._routers = [
            _Router(policy=make_policy(lambda: self._events.now, index)) for index in range(plan.num_routers)
        ]
        self._seats = {
            f"worker-{index}": _Seat(
                worker=SimulatedWorker(
                    f"worker-{index}", size, self._slowed(costs, index), self._events, ended=self._tell_end
                )
            )
            for index in range(plan.num_workers)
        }
        for seat in self._seats.values():
            self._join(seat)
            self._events.after(self._random.random() * plan.report_seconds, partial(self._report, seat))
            self._await_crash(seat)

    def run(self, traffic: Traffic) -> SimulatedRun:
        """Let all requests come, and what can be ended end."""
        for arrival in arrivals(traffic):
            self._events.run(arrival.time)
            request = SimulatedRequest(
                request=arrival.request, arrived=arrival.time, output_tokens=arrival.output_tokens
            )
            self._requests.append(request)
            self._router_of[request] = self._random.randrange(len(self._routers))
            self._send(request)
        while self._router_of and self._events.now < traffic.seconds + DRAIN_SECONDS:
            self._events.run(self._events.now + self._plan.report_seconds)
        return SimulatedRun(
            requests=tuple(self._requests),
            num_loads=sum(seat.worker.num_loads for seat in self._seats.values()),
            num_crashes=self._num_crashes,
        )

    def _slowed(self, costs: StepCosts, index: int) -> StepCosts:
        factor = 1 + self._plan.speed_spread * index / max(1, self._plan.num_workers - 1)
        return StepCosts(**{name: factor * seconds for name, seconds in vars(costs).items()})

    def _send(self, request: SimulatedRequest) -> None:
        number = self._router_of[request]
        router = self._routers[number]
        if not router.table.workers:
            self._homeless.append(request)
            return
        chosen = router.policy.choose(request.request, router.table)
        router.table.sent(chosen, request.request)
        seat = self._seats[chosen]
        lives = seat.lives

        def arrive() -> None:
            if lives != seat.lives:
                self._send(request)
                return
            seat.accepted[number] += 1
            seat.worker.take(request)

        self._events.after(self._plan.network_seconds, arrive)

    def _tell_end(self, worker: SimulatedWorker, request: SimulatedRequest) -> None:
        number, seat = self._router_of.pop(request), self._seats[worker.id]
        seat.ended[number] += 1
        lives = seat.lives

        def hear() -> None:
            if lives == seat.lives:
                self._routers[number].table.ended(worker.id)

        self._events.after(self._plan.network_seconds, hear)

    def _report(self, seat: _Seat) -> None:
        """What a worker says now is heard later, and says how it was."""
        if seat.worker.is_alive:
            reports = [self._report_for(seat, number) for number in range(len(self._routers))]
            lives = seat.lives

            def hear() -> None:
                for router, report in zip(self._routers, reports, strict=True):
                    if lives == seat.lives:
                        router.table.report(seat.worker.id, report)

            self._events.after(self._plan.network_seconds, hear)
        self._events.after(self._plan.report_seconds, partial(self._report, seat))

    def _report_for(self, seat: _Seat, number: int) -> WorkerReport:
        worker = seat.worker
        return WorkerReport(
            num_requests=len(worker.running) + len(worker.waiting),
            pending_prompt_tokens=worker.pending_prompt_tokens,
            adapters=frozenset((*worker.adapters, *worker.loading)),
            num_loading=len(worker.loading),
            free_cache_tokens=worker.free_cache_tokens,
            free_adapter_bytes=worker.free_adapter_bytes,
            costs=worker.costs,
            num_accepted=seat.accepted[number],
            num_ended=seat.ended[number],
        )

    def _join(self, seat: _Seat) -> None:
        for number, router in enumerate(self._routers):
            report = self._report_for(seat, number)
            router.table.join(seat.worker.id, report, max_num_seqs=seat.worker.size.max_num_seqs)

    def _await_crash(self, seat: _Seat) -> None:
        if mean := self._plan.mean_seconds_between_crashes:
            self._events.after(self._random.expovariate(1 / mean), partial(self._crash, seat))

    def _crash(self, seat: _Seat) -> None:
        self._num_crashes += 1
        lost = seat.worker.crash()

        def notice() -> None:
            # What is still on its way is sent again when it arrives.
            seat.lives += 1
            for router in self._routers:
                router.table.leave(seat.worker.id)
            for request in lost:
                request.num_losses += 1
                self._send(request)

        def restart() -> None:
            seat.worker.restart()
            seat.accepted.clear()
            seat.ended.clear()
            self._join(seat)
            self._await_crash(seat)
            homeless, self._homeless = self._homeless, []
            for request in homeless:
                self._send(request)

        self._events.after(self._plan.detection_seconds, notice)
        self._events.after(max(self._plan.restart_seconds, self._plan.detection_seconds), restart)
