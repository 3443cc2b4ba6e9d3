"""The routing policy of the production: the worker that is expected to be through with a request first. No torch.

An adapter that is missing is a cost and not a filter: a holder with a long queue is worse than a free worker that has
to read a file. Those who only prefer holders collapse where a few adapters get most of the requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from graftlm.routing.homes import AdapterHomes
from graftlm.routing.prefix_index import PrefixIndex
from graftlm.routing.worker_table import RoutedRequest, WorkerTable, WorkerView

# Holders, and others, that are looked at for one request. Fewer workers than that are all looked at; among many, a
# random choice also keeps several routers with the same old reports from running to the same worker.
SAMPLE = 8
# How much a request's own steps count beside its waiting, since most requests end before the most tokens that they may
# have; and what others add to these steps, which is soon over.
STEPS_WEIGHT = 0.3
NEIGHBOURS_WEIGHT = 0.2
# What a load costs those who come after, in loads. A second copy of an adapter takes the room of one that would be read
# again; the first copy is as good on any worker, but other routers, who do not know of it yet, look for it at home.
COPY_LOADS = 2.0
AWAY_LOADS = 0.5
# Where the memory is full, an adapter that is pushed out is read again.
EVICTION_LOADS = 3.0
# All of them were found by simulation, over several seeds each: loads of 0.03 to 1 s, half to nine tenths of the
# capacity, Zipf 0.7 to 1.5, equally fast workers and some twice as slow.


class ExpectedCompletion:
    """Expected seconds until a request is through, for each worker:

        turns of those before it + prompt tokens before it and its own that are not cached
        + its own tokens, a step each, at a part of their time, and of that less which others there add to it
        + if its adapter is missing: reading it after those that are being read, and what that does to others
        + waiting for room in the KV cache

    Args:
        clock: seconds, for how demand fades.
        homes, prefixes: what the policy learns about; told by `choose`.
        sample: see `SAMPLE`. seed: of the random choices.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        homes: AdapterHomes,
        prefixes: PrefixIndex,
        sample: int = SAMPLE,
        seed: int = 0,
    ) -> None:
        self._clock = clock
        self._homes = homes
        self._prefixes = prefixes
        self._sample = sample
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, table: WorkerTable) -> str:
        homes: tuple[str, ...] = ()
        if request.adapter is not None:
            self._homes.set_workers(table.ids)
            now = self._clock()
            self._homes.asked_for(request.adapter, now)
            homes = self._homes.homes(request.adapter, now)
        is_held = request.adapter is not None and bool(table.holders(request.adapter))
        elsewhere = COPY_LOADS if is_held else AWAY_LOADS
        candidates = self._candidates(request, table, homes)
        best = min(
            candidates, key=lambda view: self.seconds(request, view, copy_loads=0.0 if view.id in homes else elsewhere)
        )
        self._prefixes.record(best.id, request.prefix)
        return best.id

    def seconds(self, request: RoutedRequest, view: WorkerView, *, copy_loads: float = 0.0) -> float:
        """Expected seconds until a worker is through with a request, and what that costs others.

        Args:
            copy_loads: what reading the adapter there costs others, in loads, beside an eviction.
        """
        costs = view.costs
        rows = min(view.num_requests + 1, view.max_num_seqs)
        step = costs.step(rows=rows, adapters=min(rows, len(view.adapters)))
        own = request.output_tokens * step
        turn = own / view.max_num_seqs
        cached = self._prefixes.num_cached(view.id, request.prefix) * request.block_size
        prompts = view.pending_prompt_tokens + request.prompt_tokens - min(cached, request.prompt_tokens)
        alone = request.output_tokens * costs.step(rows=1)
        seconds = STEPS_WEIGHT * alone + NEIGHBOURS_WEIGHT * (own - alone) + prompts * costs.prompt_token_seconds
        seconds += turn * max(0, view.num_requests + 1 - view.max_num_seqs)
        if view.lacks(request.adapter):
            load = costs.load(request.adapter_bytes)
            seconds += load * (1 + view.num_loading + copy_loads)
            seconds += load * EVICTION_LOADS if request.adapter_bytes > view.free_adapter_bytes else 0.0
        footprint = request.prompt_tokens + request.output_tokens
        if footprint > view.free_cache_tokens:
            # As many tokens go as sequences like this one end.
            seconds += (footprint - view.free_cache_tokens) / footprint * own / rows
        return seconds

    def _candidates(self, request: RoutedRequest, table: WorkerTable, homes: tuple[str, ...]) -> list[WorkerView]:
        """Homes first, the others in another order each time: the first of equals is chosen."""
        near = homes if len(homes) <= self._sample else self._random.sample(homes, self._sample)
        chosen = dict.fromkeys(table.get(home) for home in near)
        if request.adapter is not None:
            holders = list(table.holders(request.adapter))
            chosen |= dict.fromkeys(self._random.sample(holders, min(self._sample, len(holders))))
        workers = table.workers
        chosen |= dict.fromkeys(self._random.sample(workers, min(self._sample, len(workers))))
        return list(chosen)
