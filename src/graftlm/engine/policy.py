"""In which order waiting requests get their turn. No torch.

Among requests of one priority a policy decides; a lower priority always comes first, as in vLLM.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from graftlm.engine.request import Request


class SchedulingPolicy(Protocol):
    """Who is next. The scheduler tells it who came and went, and what was computed for whom."""

    def arrived(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...

    def served(self, request: Request, num_tokens: int) -> None: ...

    def order(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """The waiting requests, next first. What is served while the iterator is used may change what follows."""
        ...


class FirstComeFirstServed:
    """By arrival; a preempted request keeps the place it came with."""

    def arrived(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def served(self, request: Request, num_tokens: int) -> None:
        pass

    def order(self, waiting: Iterable[Request]) -> Iterator[Request]:
        return iter(sorted(waiting, key=_by_arrival))


class FairShare:
    """The tenant that was served the fewest tokens for its share is next; within a tenant, by arrival.

    Prompt tokens that are computed and generated tokens count alike, cached ones do not. A tenant that comes back from
    doing nothing starts level with the least served of those that are busy: being idle saves nothing up.

    Args:
        shares: of tenants; 1 for all others. Of two busy tenants the one with twice the share gets twice the tokens.

    Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self._service: dict[str, float] = {}
        self._unfinished: Counter[str] = Counter()

    def arrived(self, request: Request) -> None:
        tenant = request.tenant
        if not self._unfinished[tenant]:
            level = min((self._service[other] for other in +self._unfinished), default=0.0)
            self._service[tenant] = max(self._service.get(tenant, 0.0), level)
        self._unfinished[tenant] += 1

    def left(self, request: Request) -> None:
        self._unfinished[request.tenant] -= 1

    def served(self, request: Request, num_tokens: int) -> None:
        self._service[request.tenant] += num_tokens / self._shares.get(request.tenant, 1.0)

    def order(self, waiting: Iterable[Request]) -> Iterator[Request]:
        queues: dict[str, deque[Request]] = {}
        for request in sorted(waiting, key=_by_arrival):
            queues.setdefault(request.tenant, deque()).append(request)
        heads = [self._rank(queue[0]) for queue in queues.values()]
        heapq.heapify(heads)
        while heads:
            *_, tenant = heapq.heappop(heads)
            yield queues[tenant].popleft()
            # Ranked only now: the request may have been served meanwhile.
            if queues[tenant]:
                heapq.heappush(heads, self._rank(queues[tenant][0]))

    def _rank(self, request: Request) -> tuple[int, float, int, str]:
        return request.params.priority, self._service[request.tenant], request.arrival, request.tenant


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.params.priority, request.arrival
