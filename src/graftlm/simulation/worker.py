"""A worker that takes as long as an engine would: steps, adapters that are read, a cache that fills."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts
from graftlm.routing.prefix_index import PrefixIndex
from graftlm.routing.worker_table import RoutedRequest
from graftlm.simulation.event_queue import EventQueue


@dataclass(frozen=True, kw_only=True)
class WorkerSize:
    """What a simulated worker has.

    Args:
        max_num_seqs: sequences that may run in one step.
        max_num_batched_tokens: tokens in one step.
        cache_tokens: room in the KV cache.
        adapter_memory_bytes: room for adapters.

    Raises:
        ConfigurationError: a number has no meaning.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    cache_tokens: int = 100_000
    adapter_memory_bytes: int = 160_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigurationError(f"{name} must be positive", got=value)


@dataclass(kw_only=True, eq=False)
class SimulatedRequest:
    """A request on its way. Times in seconds since the beginning; None for what has not happened.

    output_tokens: it will have. num_outputs: it has. pending_prompt: tokens to compute before its next token.
    begun: first in a step. was_cold: its adapter had to be read for it.
    """

    request: RoutedRequest
    arrived: float
    output_tokens: int
    num_outputs: int = 0
    pending_prompt: int = 0
    begun: float | None = None
    first_token: float | None = None
    ended: float | None = None
    was_cold: bool = False
    num_losses: int = 0

    @property
    def footprint(self) -> int:
        """Tokens in the cache at its end."""
        return self.request.prompt_tokens + self.output_tokens


class SimulatedWorker:
    """Iteration-level batching as in the engine: decodes first, prompts in what the step has left; an adapter is read
    beside the steps, one at a time, and the longest unused that nobody runs with goes for it.

    Several steps in which nothing changes are one event.

    Args:
        ended: told of each request that is through.
    """

    def __init__(
        self,
        worker_id: str,
        size: WorkerSize,
        costs: StepCosts,
        events: EventQueue,
        *,
        ended: Callable[[SimulatedWorker, SimulatedRequest], None],
    ) -> None:
        self.id = worker_id
        self.size = size
        self.costs = costs
        self.is_alive = True
        self.num_loads = 0
        self._events = events
        self._ended = ended
        self._start_empty()

    def _start_empty(self) -> None:
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.adapters: OrderedDict[str, int] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self.loading: OrderedDict[str, int] = OrderedDict()
        self._prefixes = PrefixIndex(self.size.cache_tokens // 16)
        self.free_cache_tokens = self.size.cache_tokens
        self.free_adapter_bytes = self.size.adapter_memory_bytes
        # Of the steps that are being computed: how many, when they began, what one takes, which plan they belong to.
        self._num_steps = 0
        self._step_began = 0.0
        self._step_seconds = 0.0
        self._prompts: list[tuple[SimulatedRequest, int]] = []
        self._decodes: list[SimulatedRequest] = []
        self._plan = 0
        self._is_busy = False

    @property
    def pending_prompt_tokens(self) -> int:
        waiting = sum(each.request.prompt_tokens for each in self.waiting)
        return waiting + sum(each.pending_prompt for each in self.running)

    def take(self, request: SimulatedRequest) -> None:
        """A request has arrived. What comes to a worker that is not alive waits until it is noticed."""
        self.waiting.append(request)
        if self.is_alive:
            self._look()

    def crash(self) -> list[SimulatedRequest]:
        """Lose everything; what was here."""
        lost = [*self.running, *self.waiting]
        # Plans of before are not those of after.
        plan = self._plan
        self._start_empty()
        self._plan = plan + 1
        self.is_alive = False
        return lost

    def restart(self) -> None:
        """Be there again, with nothing."""
        self.is_alive = True

    def _look(self) -> None:
        """Something has changed: begin a step, or stop after the one that is being computed."""
        if not self._is_busy:
            self._begin()
            return
        num_done = (self._events.now - self._step_began) / self._step_seconds
        # Not one more than were planned, whatever the last bit says.
        self._end_after(min(self._num_steps, max(1, math.ceil(num_done))))

    def _begin(self) -> None:
        self._admit()
        self._decodes = [each for each in self.running if not each.pending_prompt]
        left = self.size.max_num_batched_tokens - len(self._decodes)
        self._prompts = []
        for each in self.running:
            if each.pending_prompt and left > 0:
                chunk = min(left, each.pending_prompt)
                self._prompts.append((each, chunk))
                left -= chunk
        self._is_busy = bool(self._decodes or self._prompts)
        if not self._is_busy:
            return
        adapters = {each.request.adapter for each in (*self._decodes, *(each for each, _ in self._prompts))}
        self._step_began = self._events.now
        self._step_seconds = self.costs.step(
            rows=len(self._decodes),
            prompt_tokens=sum(chunk for _, chunk in self._prompts),
            adapters=len(adapters - {None}),
        )
        for each, _ in self._prompts:
            each.begun = self._events.now if each.begun is None else each.begun
        remaining = (each.output_tokens - each.num_outputs for each in self._decodes)
        self._end_after(1 if self._prompts else min(remaining))

    def _end_after(self, num_steps: int) -> None:
        self._plan += 1
        self._num_steps = num_steps
        plan = self._plan
        end = self._step_began + num_steps * self._step_seconds

        def end_steps() -> None:
            if plan == self._plan:
                self._end(num_steps)

        self._events.after(max(0.0, end - self._events.now), end_steps)

    def _end(self, num_steps: int) -> None:
        now = self._events.now
        for each in self._decodes:
            each.num_outputs += num_steps
        for each, chunk in self._prompts:
            each.pending_prompt -= chunk
            if not each.pending_prompt:
                each.num_outputs += 1
                each.first_token = now if each.first_token is None else each.first_token
        self._is_busy = False
        for each in [each for each in self.running if each.num_outputs >= each.output_tokens]:
            self._finish(each)
        self._begin()

    def _finish(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self.free_cache_tokens += request.footprint
        if request.request.adapter is not None:
            self._uses[request.request.adapter] -= 1
        request.ended = self._events.now
        self._ended(self, request)

    def _admit(self) -> None:
        """Waiting requests in their order; those whose adapter is missing are passed over."""
        passed: deque[SimulatedRequest] = deque()
        while self.waiting and len(self.running) < self.size.max_num_seqs:
            request = self.waiting.popleft()
            adapter = request.request.adapter
            if adapter is not None and adapter not in self.adapters:
                request.was_cold = True
                self._load(adapter, request.request.adapter_bytes)
                passed.append(request)
            elif request.footprint > self.free_cache_tokens and self.running:
                passed.append(request)
                break
            else:
                self._run(request)
        self.waiting.extendleft(reversed(passed))

    def _run(self, request: SimulatedRequest) -> None:
        routed = request.request
        if routed.adapter is not None:
            self._uses[routed.adapter] += 1
            self.adapters.move_to_end(routed.adapter)
        self.free_cache_tokens -= request.footprint
        cached = min(self._prefixes.num_cached("", routed.prefix) * routed.block_size, routed.prompt_tokens - 1)
        self._prefixes.record("", routed.prefix)
        # What it had before it lost its worker is prompt now.
        request.pending_prompt = routed.prompt_tokens - cached + request.num_outputs
        self.running.append(request)

    def _load(self, adapter: str, num_bytes: int) -> None:
        if adapter in self.loading:
            return
        idle = [other for other in self.adapters if not self._uses[other]]
        while num_bytes > self.free_adapter_bytes and idle:
            self.free_adapter_bytes += self.adapters.pop(idle.pop(0))
        if num_bytes > self.free_adapter_bytes:
            return
        self.free_adapter_bytes -= num_bytes
        self.loading[adapter] = num_bytes
        self.num_loads += 1
        if len(self.loading) == 1:
            self._read_next()

    def _read_next(self) -> None:
        adapter, num_bytes = next(iter(self.loading.items()))
        loading = self.loading

        def loaded() -> None:
            # A crash has made another.
            if loading is not self.loading:
                return
            self.adapters[adapter] = self.loading.pop(adapter)
            if self.loading:
                self._read_next()
            self._look()

        self._events.after(self.costs.load(num_bytes), loaded)
