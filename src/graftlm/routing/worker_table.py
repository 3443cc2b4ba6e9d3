"""What a router believes of its workers: their last reports, and what it has done since. No torch.

A report is old when it comes, and older when it is used. What the router itself has sent meanwhile it knows exactly,
and counts at once; otherwise everything that arrives between two reports would go to the one worker that looked free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from graftlm.routing.costs import StepCosts


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """What routing needs to know of a request.

    adapter: its digest; None is the base. adapter_bytes: its size. output_tokens: expected to be generated.
    prefix: the hashes of its prompt's blocks, each of which stands for all before it. block_size: tokens of each.
    """

    adapter: str | None
    adapter_bytes: int = 0
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_size: int = 16


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker says of itself.

    num_requests: that it has taken and not finished, whoever sent them. pending_prompt_tokens: of those, not computed.
    adapters: digests in memory. num_loading: adapters that are being read, or wait to be.
    free_cache_tokens: room in the KV cache. free_adapter_bytes: room for adapters.
    num_accepted, num_ended: requests of the router that the report goes to which the worker had taken and ended.
    costs: of its steps.
    """

    num_requests: int = 0
    pending_prompt_tokens: int = 0
    adapters: frozenset[str] = frozenset()
    num_loading: int = 0
    free_cache_tokens: int
    free_adapter_bytes: int
    costs: StepCosts
    num_accepted: int = 0
    num_ended: int = 0


@dataclass(kw_only=True, eq=False)
class WorkerView:
    """A worker as its router sees it now: numbers as in `WorkerReport`, and what was sent since counted in.

    max_num_seqs: sequences it runs at once; more of them wait.
    """

    id: str
    max_num_seqs: int
    costs: StepCosts
    num_requests: int = 0
    pending_prompt_tokens: int = 0
    adapters: set[str] = field(default_factory=set)
    num_loading: int = 0
    free_cache_tokens: int = 0
    free_adapter_bytes: int = 0
    num_sent: int = 0
    num_ended: int = 0
    unconfirmed: deque[tuple[int, RoutedRequest]] = field(default_factory=deque)

    def lacks(self, adapter: str | None) -> bool:
        return adapter is not None and adapter not in self.adapters


class WorkerTable:
    """The workers that can be chosen. Not thread-safe."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerView] = {}
        self._holders: dict[str, dict[str, WorkerView]] = {}
        self._listed: list[WorkerView] | None = None
        self._ids: tuple[str, ...] | None = None

    @property
    def workers(self) -> Sequence[WorkerView]:
        """In the order in which they came."""
        if self._listed is None:
            self._listed = list(self._workers.values())
        return self._listed

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the workers, in the same order; the same object as long as they are the same."""
        if self._ids is None:
            self._ids = tuple(self._workers)
        return self._ids

    def holders(self, adapter: str) -> Collection[WorkerView]:
        """Those that have an adapter in memory, or were sent a request for it."""
        return self._holders.get(adapter, {}).values()

    def get(self, worker_id: str) -> WorkerView:
        """Raises KeyError: it is none."""
        return self._workers[worker_id]

    def join(self, worker_id: str, report: WorkerReport, *, max_num_seqs: int) -> None:
        """A worker can be chosen from now on."""
        self.leave(worker_id)
        self._workers[worker_id] = WorkerView(id=worker_id, max_num_seqs=max_num_seqs, costs=report.costs)
        self._listed = self._ids = None
        self.report(worker_id, report)

    def leave(self, worker_id: str) -> None:
        """A worker is not chosen any more. Unknown ones are fine."""
        view = self._workers.pop(worker_id, None)
        if view is not None:
            self._listed = self._ids = None
            self._hold(view, frozenset())

    def report(self, worker_id: str, report: WorkerReport) -> None:
        """Take over what a worker says; what it cannot know yet is counted on top. Of unknown workers nothing."""
        view = self._workers.get(worker_id)
        if view is None:
            return
        while view.unconfirmed and view.unconfirmed[0][0] <= report.num_accepted:
            view.unconfirmed.popleft()
        view.num_requests = max(0, report.num_requests - max(0, view.num_ended - report.num_ended))
        view.pending_prompt_tokens = report.pending_prompt_tokens
        view.num_loading = report.num_loading
        view.costs = report.costs
        view.free_cache_tokens = report.free_cache_tokens
        view.free_adapter_bytes = report.free_adapter_bytes
        self._hold(view, report.adapters)
        for _, request in view.unconfirmed:
            self._count(view, request)

    def sent(self, worker_id: str, request: RoutedRequest) -> None:
        """A request went to a worker."""
        view = self._workers[worker_id]
        view.num_sent += 1
        view.unconfirmed.append((view.num_sent, request))
        self._count(view, request)

    def ended(self, worker_id: str) -> None:
        """A request that went to a worker is over."""
        view = self._workers.get(worker_id)
        if view is not None:
            view.num_ended += 1
            view.num_requests = max(0, view.num_requests - 1)

    def _count(self, view: WorkerView, request: RoutedRequest) -> None:
        view.num_requests += 1
        view.pending_prompt_tokens += request.prompt_tokens
        view.free_cache_tokens -= request.prompt_tokens + request.output_tokens
        if request.adapter is not None and request.adapter not in view.adapters:
            view.adapters.add(request.adapter)
            view.num_loading += 1
            view.free_adapter_bytes -= request.adapter_bytes
            self._holders.setdefault(request.adapter, {})[view.id] = view

    def _hold(self, view: WorkerView, adapters: Iterable[str]) -> None:
        wanted = set(adapters)
        for gone in view.adapters - wanted:
            holders = self._holders[gone]
            del holders[view.id]
            if not holders:
                del self._holders[gone]
        for new in wanted - view.adapters:
            self._holders.setdefault(new, {})[view.id] = view
        view.adapters = wanted
