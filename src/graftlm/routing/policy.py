"""What a routing policy is. No torch."""

from __future__ import annotations

from typing import Protocol

from graftlm.routing.worker_table import RoutedRequest, WorkerTable


class RoutingPolicy(Protocol):
    """Chooses the worker of each request. The table has at least one worker."""

    def choose(self, request: RoutedRequest, table: WorkerTable) -> str:
        """The worker's id."""
        ...
