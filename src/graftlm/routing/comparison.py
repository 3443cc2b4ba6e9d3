"""Routing policies of other systems, as far as their effect on adapters goes, to be compared with. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from graftlm.routing.worker_table import RoutedRequest, WorkerTable, WorkerView


class LeastQueue:
    """The worker with the fewest requests, whatever it holds (join the shortest queue)."""

    def __init__(self, *, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, table: WorkerTable) -> str:
        return _least_loaded(table.workers, self._random).id


class HolderFilter:
    """Only workers that hold the adapter, the least loaded of them; whoever holds nothing yet only if nobody does.

    Source: Petals' routing drops servers that do not announce the adapter (there nobody would load it). Petals does not
    see queues; this one does.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, table: WorkerTable) -> str:
        holders = [] if request.adapter is None else list(table.holders(request.adapter))
        return _least_loaded(holders or table.workers, self._random).id


class HolderAffinity:
    """The better of two random holders while any of them takes requests; else the better of two of those that hold the
    fewest adapters.

    Args:
        max_ongoing: requests beyond which a worker takes none.

    Source: Ray Serve's multiplexing over power of two choices; 5 is `max_ongoing_requests`' default.
    """

    def __init__(self, *, max_ongoing: int = 5, seed: int = 0) -> None:
        self._max_ongoing = max_ongoing
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, table: WorkerTable) -> str:
        holders = [] if request.adapter is None else self._taking(table.holders(request.adapter))
        if holders:
            return self._better_of_two(holders).id
        others = self._taking(table.workers)
        if request.adapter is not None and others:
            fewest = min(len(view.adapters) for view in others)
            others = [view for view in others if len(view.adapters) == fewest]
        return self._better_of_two(others or table.workers).id

    def _taking(self, views: Iterable[WorkerView]) -> list[WorkerView]:
        return [view for view in views if view.num_requests < self._max_ongoing]

    def _better_of_two(self, views: Sequence[WorkerView]) -> WorkerView:
        return _least_loaded(self._random.sample(views, min(2, len(views))), self._random)


def _least_loaded(views: Sequence[WorkerView], chance: random.Random) -> WorkerView:
    fewest = min(view.num_requests for view in views)
    return chance.choice([view for view in views if view.num_requests == fewest])
