"""Who computes which tokens in the next step. Plain Python: it is tested on a machine without torch.

There is no prefill phase. A request has tokens, some of them computed; each step it catches up by as many as the token
budget allows. Chunked prefill, decoding and resuming after preemption are the same mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from graftlm.engine.block_hashes import extend_hashes
from graftlm.engine.block_pool import BlockHash
from graftlm.engine.cache_blocks import CacheBlocks
from graftlm.engine.outputs import FinishReason
from graftlm.engine.policy import SchedulingPolicy
from graftlm.engine.request import Request
from graftlm.engine.residency import Residency
from graftlm.engine.stage_range import StageRange
from graftlm.models.length_regimes import LengthRegimes, Regime

# A prompt whose every row needs logits goes in small chunks: 64 rows of a 256k vocabulary are 67 MB in float32.
PROMPT_LOGITS_CHUNK = 64
# Stop reason of a request that was given up because its logits are NaN.
NOT_A_NUMBER = "the model's output is not a number"


@dataclass(frozen=True, kw_only=True)
class ScheduledSequence:
    """Tokens of one request to compute now.

    start: position of the first of them. active_from: position from which the adapter is active.
    prompt_len, sequence_len: tokens of the prompt, and tokens known so far; rotary frequencies may depend on them.
    block_tables: one for each cache group, as in `BlockTable`; all of them again for each time that an adapter's layers
        fill the cache's.
    num_logits: how many of the last rows need logits; 0 when the prompt goes on.
    """

    request_id: str
    adapter_digest: str | None
    token_ids: tuple[int, ...]
    start: int
    active_from: int
    prompt_len: int
    sequence_len: int
    block_tables: tuple[Sequence[int], ...]
    num_logits: int

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Computed tokens of one request that some stages compute again, because they have lost them. sequence: wants no
    logits, and none of its blocks was given back."""

    sequence: ScheduledSequence
    stages: StageRange


@dataclass(frozen=True, kw_only=True)
class AdapterLoad:
    """An adapter to load now, for which there is room. request_id: of the first request that waits for it."""

    digest: str
    request_id: str


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """One step. Base rows come first, then each adapter's sequences together, so an adapter is one segment.

    replays: what some stages compute besides, in the same order; of other requests.
    loads: what has to be loaded before some of the waiting requests can run.
    """

    sequences: tuple[ScheduledSequence, ...]
    replays: tuple[Replay, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Whose tokens are computed, for the first time or again."""
        replayed = [replay.sequence for replay in self.replays]
        return tuple([sequence.request_id for sequence in (*self.sequences, *replayed)])

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.replays)


class Scheduler:
    """Decodes before prompts; waiting requests in the policy's order; preemption by recomputing.

    With a prefix cache, a request that arrives while another computes the beginning they share waits for it.

    A request pins its adapter while it runs, and only then. One whose adapter is not resident is passed over, and the
    adapter loaded as soon as there is room. If what is pinned is in the way, nothing more is admitted for the adapters
    that have the least left to do, as many of them as the room takes, until they have gone. So traffic for others
    cannot keep an adapter out: while a request is the first that waits for an absent adapter, the most that those in
    its way have left to do falls with every step in which they compute, and all of them do by the time the prompts
    before theirs are through. With S sequences at once that compute at most W tokens each, they have gone after at
    most S * W steps, and once loaded, the request runs in at most S * W more; times the steps in flight.

    A request is in flight from the step it is scheduled in until that step's `update`, and is not scheduled meanwhile.
    It may be preempted or finished: steps are computed in the order in which they were scheduled, so whoever gets its
    blocks writes to them after it did.

    Where layers are divided into stages and some have lost what they had cached, these compute it again, and no others
    do: a request is replayed, in chunks like a prompt's, and goes on from where it was. Decodes of requests that have
    been replayed already go first, prompts and new requests last. Blocks that several requests share are replayed once.

    Args:
        residency: which adapters are in memory. policy: whose turn it is.
        max_num_seqs: sequences that run, never more than `max_num_batched_tokens`: every running sequence can then
            decode one token in every step.
        num_in_flight: steps that are in flight at once. Each takes its share of the running sequences.
        max_num_batched_tokens: tokens in one step.
        prefix_cache: reuse blocks whose content is known.
        length_regimes: a request that grows into another regime is computed anew from its first token.
    """

    def __init__(
        self,
        blocks: CacheBlocks,
        *,
        residency: Residency[Any],
        policy: SchedulingPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool,
        length_regimes: LengthRegimes,
        num_in_flight: int = 1,
    ) -> None:
        self._blocks = blocks
        self._residency = residency
        self._policy = policy
        self._prefix_cache = prefix_cache
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._length_regimes = length_regimes
        self._num_in_flight = num_in_flight
        self._waiting: dict[str, Request] = {}
        # In the order of their admission.
        self._running: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._in_flight: set[str] = set()
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt and output fit the cache: the engine's context length is capped by it."""
        request.block_tables = self._blocks.empty_tables(request.cache_factor)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request
        self._policy.arrived(request)

    def get(self, request_id: str) -> Request:
        """An unfinished request."""
        return self._requests[request_id]

    def waiting_for(self, digest: str) -> list[Request]:
        """The waiting requests of an adapter."""
        return [request for request in self._waiting.values() if request.adapter_digest == digest]

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a request, wherever it is, and free its blocks. Unknown and finished ids are fine."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._in_flight.discard(request_id)
        if request_id in self._waiting:
            del self._waiting[request_id]
        else:
            del self._running[request_id]
            self._unpin(request)
        self._blocks.release(request.block_tables)
        self._policy.left(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them blocks. Its requests are in flight then."""
        budget = self._max_num_batched_tokens
        scheduled: dict[str, int] = {}
        ready = [request for request_id, request in self._running.items() if request_id not in self._in_flight]
        self._pass_over_replayed(ready)
        held_up = self._held_up()
        limit = self._share(len(self._running))
        for request in sorted(ready, key=_turn):
            if len(scheduled) == limit:
                break
            if request.request_id not in self._running or request.request_id in held_up:
                continue  # preempted a moment ago to make room for another, or another replays what it needs
            if request.lost_by is not None:
                left = request.num_computed_tokens - request.num_replayed_tokens
                if count := min(left, budget, self._blocks.chunk_tokens):
                    scheduled[request.request_id] = count
                    budget -= count
            elif self._reserve(request, spare=scheduled) and (count := self._chunk(request, budget)):
                self._plan(request, count, scheduled)
                budget -= count
        loads, closed = self._make_room()
        self._admit(budget, scheduled, closed)
        self._in_flight.update(scheduled)
        # Stable: within an adapter the order of arrival stays.
        in_step = sorted(self._in_step(scheduled), key=lambda request: request.adapter_digest or "")
        return SchedulerOutput(
            sequences=tuple(
                self._sequence(request, scheduled[request.request_id]) for request in in_step if request.lost_by is None
            ),
            replays=tuple(
                self._replay(request, request.lost_by, scheduled[request.request_id])
                for request in in_step
                if request.lost_by is not None
            ),
            loads=tuple(loads),
        )

    def withdraw(self, output: SchedulerOutput) -> None:
        """Take a step back that was not computed: its requests are scheduled again."""
        self._in_flight.difference_update(output.request_ids)

    def drop_steps(self) -> None:
        """Forget the steps in flight: their tokens are to be computed in others, to the same slots."""
        self._in_flight.clear()

    def lose(self, stages: StageRange) -> None:
        """Note that stages have lost what they had in the cache, and that no step is in flight.

        Running requests are replayed there, and what they hold is known again as far as that has got; the rest of the
        prefix cache is forgotten. If all stages have lost it, or some of a request's blocks were given back, or its
        adapter has layers of its own order, its tokens are all there is to go by: it is computed anew, by all stages.
        """
        for request in reversed(list(self._running.values())):
            lost_by = stages.union(request.lost_by)
            is_whole = not request.replicates_layers and not any(table.num_dropped for table in request.block_tables)
            if lost_by.is_everything or not is_whole:
                self._preempt(request)
            elif request.num_computed_tokens > 0:
                request.lost_by, request.num_replayed_tokens = lost_by, 0
        self._blocks.forget()

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, int | None], passed_over: Set[str] = frozenset()
    ) -> list[Request]:
        """Record a computed step, the oldest in flight: append sampled tokens, finish what is done. What has finished
        meanwhile is left out; what was preempted has its token, and nothing computed.

        Args:
            sampled: request id -> token, for the sequences that had a token to sample; None ends a request whose
                logits were not numbers.
            passed_over: requests that had a token to sample and got none: their last one is computed again.

        Returns: requests that got a token or finished.
        """
        moved = []
        self._end_replays(output.replays)
        for sequence in output.sequences:
            request = self._requests.get(sequence.request_id)
            if request is None:
                continue
            self._in_flight.discard(request.request_id)
            is_passed_over = request.request_id in passed_over
            if request.request_id not in self._waiting:
                self._advance(request, sequence.stop - is_passed_over)
            if is_passed_over:
                continue
            token_id = sampled.get(sequence.request_id)
            if token_id is not None:
                self._append(request, token_id)
            elif sequence.request_id in sampled:
                self.finish(sequence.request_id, "abort", NOT_A_NUMBER)
            elif not self._is_prompt_only(request):
                continue
            if request.finish_reason is None:
                self._finish_if_done(request)
            moved.append(request)
        return moved

    def append(self, request: Request, token_id: int) -> None:
        """Go on with a token that is certain without a step; it is computed in the next one, with what follows."""
        self._append(request, token_id)
        self._finish_if_done(request)

    def _end_replays(self, replays: Sequence[Replay]) -> None:
        for replay in replays:
            request = self._requests.get(replay.sequence.request_id)
            if request is None:
                continue
            self._in_flight.discard(request.request_id)
            if request.request_id not in self._waiting:
                self._record(request, request.num_replayed_tokens, replay.sequence.stop)
                self._replayed(request, replay.sequence.stop)

    def _pass_over_replayed(self, requests: Sequence[Request]) -> None:
        """What another request that shares the blocks has replayed need not be replayed again."""
        if not self._prefix_cache:
            return
        for request in requests:
            if request.lost_by is not None:
                start = request.num_replayed_tokens // self._blocks.block_size
                count = self._blocks.num_known(request.block_tables, request.block_hashes, start=start)
                if count:
                    known = (start + count) * self._blocks.block_size
                    self._replayed(request, min(known, request.num_computed_tokens))

    def _replayed(self, request: Request, num_tokens: int) -> None:
        request.num_replayed_tokens = num_tokens
        if num_tokens == request.num_computed_tokens:
            request.lost_by, request.num_replayed_tokens = None, 0

    def _held_up(self) -> set[str]:
        """Requests whose next block to be replayed is held, and replayed, by one that was admitted before them."""
        held_up: set[str] = set()
        coming: set[int] = set()
        for request in self._running.values():
            if request.lost_by is not None:
                size = self._blocks.block_size
                start, stop = request.num_replayed_tokens // size, -(-request.num_computed_tokens // size)
                blocks = request.block_tables[0].blocks[start:stop]
                if blocks[0] in coming:
                    held_up.add(request.request_id)
                coming.update(blocks)
        return held_up

    def _append(self, request: Request, token_id: int) -> None:
        num_tokens = request.num_tokens
        request.output_token_ids.append(token_id)
        if request.grammar is not None:
            request.grammar.advance(token_id)
        if self._length_regimes.ends_at(num_tokens):
            self._start_over(request)
            request.block_hashes.clear()

    def _regime(self, request: Request) -> Regime:
        return self._length_regimes.regime(prompt_len=len(request.prompt_token_ids), sequence_len=request.num_tokens)

    def _is_prompt_only(self, request: Request) -> bool:
        return request.max_tokens == 0 and request.num_pending_tokens == 0

    def _finish_if_done(self, request: Request) -> None:
        last = request.output_token_ids[-1] if request.output_token_ids else None
        if last in request.stop_token_ids and len(request.output_token_ids) > request.params.min_tokens:
            asked_for = last in request.params.stop_token_ids
            self.finish(request.request_id, "stop", last if asked_for else None)
        elif request.grammar is not None and request.grammar.is_complete:
            self.finish(request.request_id, "stop")
        elif len(request.output_token_ids) >= request.max_tokens:
            self.finish(request.request_id, "length")

    def _make_room(self) -> tuple[list[AdapterLoad], Set[str]]:
        """Begin loading the adapters that waiting requests need and that find room.

        An adapter that finds none is not overtaken by those that are needed later, and does not push out those that are
        needed before.

        Returns: what to load, and the adapters for which nothing may be admitted, so that they go.
        """
        loads: list[AdapterLoad] = []
        needed: set[str] = set()
        for request in self._policy.order(self._waiting.values()):
            digest = request.adapter_digest
            if digest is None or digest in needed:
                continue
            if self._residency.state(digest) == "absent":
                work = self._work_left()
                if not self._residency.reserve(digest, request.adapter_bytes, keep=needed, work=work):
                    return loads, self._residency.in_the_way(request.adapter_bytes, keep=needed, work=work)
                loads.append(AdapterLoad(digest=digest, request_id=request.request_id))
            needed.add(digest)
        return loads, frozenset()

    def _work_left(self) -> dict[str, int]:
        """By adapter, the most tokens that one of its running requests has left."""
        work: dict[str, int] = {}
        for request in self._running.values():
            if request.adapter_digest is not None:
                left = max(work.get(request.adapter_digest, 0), request.num_remaining_tokens)
                work[request.adapter_digest] = left
        return work

    def _admit(self, budget: int, scheduled: dict[str, int], closed: Set[str]) -> None:
        """Let waiting requests run while there is budget, room in the step, and blocks for all they have."""
        if not self._waiting:
            return
        being_computed = self._being_computed()
        limit = self._share(min(len(self._running) + len(self._waiting), self._max_num_seqs))
        for request in self._policy.order(self._waiting.values()):
            if budget <= 0 or len(self._running) >= self._max_num_seqs or len(scheduled) >= limit:
                break
            if request.request_id in self._in_flight or request.adapter_digest in closed or not self._pin(request):
                continue
            num_cached = self._share_prefix(request)
            if self._awaits(request, being_computed):
                self._blocks.release(request.block_tables)
                self._unpin(request)
                continue
            request.num_computed_tokens = num_cached
            if not self._fits(request):
                self._blocks.release(request.block_tables)
                self._unpin(request)
                request.num_computed_tokens = 0
                break
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            self._extend(request)
            being_computed.update(self._uncomputed(request))
            count = self._chunk(request, budget)
            self._plan(request, count, scheduled)
            budget -= count

    def _plan(self, request: Request, count: int, scheduled: dict[str, int]) -> None:
        scheduled[request.request_id] = count
        self._policy.served(request, count)

    def _share(self, num_requests: int) -> int:
        """How many of so many requests a step takes, so that every step in flight has as many."""
        return -(-num_requests // self._num_in_flight)

    def _pin(self, request: Request) -> bool:
        """Keep a request's adapter in memory; False when it is not there. The base is."""
        return request.adapter_digest is None or self._residency.pin(request.adapter_digest)

    def _unpin(self, request: Request) -> None:
        if request.adapter_digest is not None:
            self._residency.unpin(request.adapter_digest)

    def _share_prefix(self, request: Request) -> int:
        """Give a waiting request what the cache has of its tokens; how many that are. Its last token is computed
        whatever the cache has, for its logits, and so is a prompt of which all logits are wanted."""
        if not self._prefix_cache or request.wants_prompt_logits:
            return 0
        extend_hashes(request, self._blocks.block_size, self._regime(request))
        usable = (request.num_tokens - 1) // self._blocks.block_size
        return self._blocks.share_prefix(request.block_tables, request.block_hashes[:usable]) * self._blocks.block_size

    def _awaits(self, request: Request, being_computed: Set[BlockHash]) -> bool:
        """Whether the next block of a waiting request, of which the blocks it has are shared, is being computed."""
        if not self._prefix_cache or request.wants_prompt_logits:
            return False
        following = len(request.block_tables[0].blocks)
        usable = (request.num_tokens - 1) // self._blocks.block_size
        return following < usable and request.block_hashes[following] in being_computed

    def _being_computed(self) -> set[BlockHash]:
        """Full blocks that running requests still have to compute."""
        return {block_hash for request in self._running.values() for block_hash in self._uncomputed(request)}

    def _uncomputed(self, request: Request) -> Sequence[BlockHash]:
        return request.block_hashes[request.num_kept_tokens // self._blocks.block_size :]

    def _advance(self, request: Request, num_computed: int) -> None:
        """A step has computed a request's tokens up to here."""
        self._record(request, request.num_computed_tokens, num_computed)
        request.num_computed_tokens = num_computed
        self._blocks.drop_behind(request.block_tables, num_computed=num_computed)

    def _record(self, request: Request, start: int, stop: int) -> None:
        """Note what is in the blocks that tokens [start, stop) of a request have filled."""
        size = self._blocks.block_size
        first, end = start // size, stop // size
        if self._prefix_cache and first < end:
            extend_hashes(request, size, self._regime(request))
            self._blocks.record(request.block_tables, request.block_hashes, start=first, stop=end)

    def _chunk(self, request: Request, budget: int) -> int:
        limit = self._blocks.chunk_tokens
        if request.wants_prompt_logits:
            limit = min(limit, PROMPT_LOGITS_CHUNK)
        return min(request.num_pending_tokens, budget, limit)

    def _reserve(self, request: Request, spare: Mapping[str, int]) -> bool:
        """Blocks for a running request's next chunk, preempting others if need be, the least urgent and youngest first.

        Args:
            spare: requests already in this step, which are not preempted.

        Returns: whether it has them; if not, it was preempted itself.
        """
        if self._blocks.covers(
            request.block_tables, num_computed=request.num_computed_tokens, num_tokens=request.num_tokens
        ):
            return True
        while not self._fits(request):
            victims = [other for other in self._running.values() if other.request_id not in spare]
            victim = max(reversed(victims), key=lambda other: other.params.priority)
            self._preempt(victim)
            if victim is request:
                return False
        self._extend(request)
        return True

    def _preempt(self, request: Request) -> None:
        del self._running[request.request_id]
        self._unpin(request)
        self._start_over(request)
        self._waiting[request.request_id] = request

    def _start_over(self, request: Request) -> None:
        self._blocks.release(request.block_tables)
        request.num_computed_tokens = 0
        request.lost_by, request.num_replayed_tokens = None, 0

    def _fits(self, request: Request) -> bool:
        return self._blocks.fits(
            request.block_tables, num_computed=request.num_computed_tokens, num_tokens=request.num_tokens
        )

    def _extend(self, request: Request) -> None:
        self._blocks.extend(
            request.block_tables, num_computed=request.num_computed_tokens, num_tokens=request.num_tokens
        )

    def _in_step(self, scheduled: Mapping[str, int]) -> list[Request]:
        return [request for request_id, request in self._running.items() if request_id in scheduled]

    def _sequence(self, request: Request, count: int) -> ScheduledSequence:
        completes = request.num_computed_tokens + count == request.num_tokens
        num_logits = count if request.wants_prompt_logits else int(completes)
        return self._tokens(request, request.num_computed_tokens, count, num_logits)

    def _replay(self, request: Request, stages: StageRange, count: int) -> Replay:
        return Replay(sequence=self._tokens(request, request.num_replayed_tokens, count, 0), stages=stages)

    def _tokens(self, request: Request, start: int, count: int, num_logits: int) -> ScheduledSequence:
        return ScheduledSequence(
            request_id=request.request_id,
            adapter_digest=request.adapter_digest,
            token_ids=request.tokens(start, start + count),
            start=start,
            active_from=request.active_from,
            prompt_len=len(request.prompt_token_ids),
            sequence_len=request.num_tokens,
            block_tables=tuple([table.packed for table in request.block_tables]),
            num_logits=num_logits,
        )


def _turn(request: Request) -> int:
    """Whose turn it is within a step: decodes, then replays, then prompts."""
    return 1 if request.lost_by is not None else 2 * (request.num_pending_tokens > 1)
