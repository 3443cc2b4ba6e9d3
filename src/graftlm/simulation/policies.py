"""The policies that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graftlm.routing.comparison import HolderAffinity, HolderFilter, LeastQueue
from graftlm.routing.expected_completion import ExpectedCompletion
from graftlm.routing.homes import AdapterHomes
from graftlm.routing.policy import RoutingPolicy
from graftlm.routing.prefix_index import PrefixIndex
from graftlm.simulation.cluster import MakePolicy


def _expected_completion(clock: Callable[[], float], seed: int) -> RoutingPolicy:
    return ExpectedCompletion(clock=clock, homes=AdapterHomes(), prefixes=PrefixIndex(), seed=seed)


POLICIES: Mapping[str, MakePolicy] = {
    "expected-completion": _expected_completion,
    "least-queue": lambda clock, seed: LeastQueue(seed=seed),
    "holder-affinity": lambda clock, seed: HolderAffinity(seed=seed),
    "holder-filter": lambda clock, seed: HolderFilter(seed=seed),
}
