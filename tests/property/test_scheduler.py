"""Random traffic over the scheduler, a small block pool and too little memory for all adapters; the model is a pure
function of the tokens so far, its stages lose what they have cached, and adapters arrive when it pleases the test."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from graftlm import SamplingParams
from graftlm.engine.block_pool import BlockPool
from graftlm.engine.cache_blocks import DROPPED, CacheBlocks, CacheGroup, blocks_for_window
from graftlm.engine.policy import FairShare, FirstComeFirstServed, SchedulingPolicy
from graftlm.engine.request import Request
from graftlm.engine.residency import Residency
from graftlm.engine.scheduler import PROMPT_LOGITS_CHUNK, Replay, ScheduledSequence, Scheduler, SchedulerOutput
from graftlm.engine.stage_range import StageRange
from graftlm.models.cache_layout import farthest_group
from graftlm.models.length_regimes import LengthRegimes, Regime

VOCAB = 31
END_TOKEN = 0
# Digest -> bytes of its weights.
ADAPTERS = {"a": 3, "b": 1, "c": 4, "d": 2}


def next_token(request: Request, outputs: list[int]) -> int:
    """What the model says after these tokens. End tokens are held off as the sampler does for min_tokens."""
    state = sum(map(ord, request.adapter_digest or "base"))
    for token_id in (*request.prompt_token_ids, *outputs):
        state = (state * 31 + token_id + 7) % 1_000_003
    choice = state % VOCAB
    while len(outputs) < request.params.min_tokens and choice in request.stop_token_ids:
        choice = (choice + 1) % VOCAB
    return choice


@dataclass
class Answer:
    """What a request must come to when nothing else runs."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: int | None = None


def solo(request: Request) -> Answer:
    answer = Answer()
    while len(answer.token_ids) < request.max_tokens:
        answer.token_ids.append(token_id := next_token(request, answer.token_ids))
        if token_id in request.stop_token_ids and len(answer.token_ids) > request.params.min_tokens:
            answer.finish_reason = "stop"
            answer.stop_reason = token_id if token_id in request.params.stop_token_ids else None
            break
    return answer


ONE_REGIME = LengthRegimes()
GROWING = LengthRegimes(sequence_lens=frozenset({3, 9}))
LONG_PROMPTS = LengthRegimes(prompt_lens=frozenset({4}))


# What is in a slot.
Content = tuple[str | None, Regime, tuple[int, ...]]
RUBBISH: Content = ("rubbish", (0, 0), ())


class Traffic(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; every step is checked against a simulated cache."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.integers(2, 8) | st.integers(8, 16),
        windows=st.sampled_from([(None,), (None,), (None, 3), (4,), (2, None, 7)]),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6) | st.just(6),
        max_num_batched_tokens=st.integers(1, 24) | st.just(16),
        chunk_tokens=st.just(24) | st.integers(1, 9),
        prefix_cache=st.sampled_from([True, True, False]),
        length_regimes=st.sampled_from([ONE_REGIME, GROWING, GROWING, LONG_PROMPTS]),
        adapter_bytes=st.sampled_from([4, 4, 5, 7]),
        policy=st.sampled_from(["fcfs", "fair"]),
        num_in_flight=st.sampled_from([1, 2, 2, 3]),
        num_stages=st.sampled_from([1, 2, 3, 3]),
    )
    def build(self, **shape: Any) -> None:
        num_blocks = shape.pop("num_blocks")
        self.shape = shape
        self.num_stages = shape.pop("num_stages")
        self.windows: tuple[int | None, ...] = shape.pop("windows")
        placement = {"block_size": shape.pop("block_size"), "chunk_tokens": shape.pop("chunk_tokens")}
        self.block_size, self.chunk_tokens = placement["block_size"], placement["chunk_tokens"]
        # Just enough for one sequence, and what short ones have in common with the other groups.
        most = [window if window is None else blocks_for_window(window, **placement) for window in self.windows]
        self.pools = [BlockPool(num_blocks if blocks is None else min(num_blocks, blocks)) for blocks in most]
        groups = [CacheGroup(window=window, pool=pool) for window, pool in zip(self.windows, self.pools, strict=True)]
        self.residency: Residency[str] = Residency(shape.pop("adapter_bytes"))
        policy: SchedulingPolicy = FairShare({"a": 3.0}) if shape.pop("policy") == "fair" else FirstComeFirstServed()
        self.scheduler = Scheduler(CacheBlocks(groups, **placement), residency=self.residency, policy=policy, **shape)
        self.loading: list[str] = []
        self.in_flight: deque[SchedulerOutput] = deque()
        limits = [
            pool.num_blocks
            for pool, blocks in zip(self.pools, most, strict=True)
            if blocks is None or pool.num_blocks < blocks
        ]
        self.capacity = min(limits, default=20) * self.block_size
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.computed: dict[str, int] = {}
        # By stage, group and slot; and what each stage gave to the next, by stage and slot.
        self.cache: dict[tuple[int, int, int], Content] = {}
        self.journal: dict[tuple[int, int], Content] = {}
        self.steps_since_arrival = 0

    @rule(
        # Short prompts with long answers outgrow the pool together; long ones come in chunks; some begin alike.
        prompt_len=st.integers(1, 4) | st.integers(5, 30) | st.sampled_from([13, 20]),
        begins_alike=st.sampled_from([True, True, False]),
        seed=st.integers(0, 99),
        max_tokens=st.integers(0, 2) | st.integers(10, 30),
        min_tokens=st.integers(0, 3),
        adapter=st.sampled_from([*[None] * 4, *ADAPTERS]),
        priority=st.sampled_from([0, 0, 0, 1]),
        stop=st.sampled_from([(), (3,), (3, 4)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        num_alike=st.sampled_from([1, 1, 3]),
    )
    def add(self, *, num_alike: int, seed: int, **what: Any) -> None:
        for index in range(num_alike):
            self._add(seed=seed + index, **what)

    def _add(
        self,
        *,
        prompt_len: int,
        begins_alike: bool,
        seed: int,
        max_tokens: int,
        min_tokens: int,
        adapter: str | None,
        priority: int,
        stop: tuple[int, ...],
        ignore_eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        tokens = random.Random(seed)
        prompt = [tokens.randrange(VOCAB) for _ in range(prompt_len)]
        if begins_alike:
            prompt[:-1] = [*range(1, VOCAB)][: prompt_len - 1]
        prompt = prompt[: self.capacity]
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop,
            prompt_logprobs=prompt_logprobs,
            priority=priority,
        )
        request = Request(
            request_id=f"r{len(self.requests)}",
            index=0,
            prompt_token_ids=tuple(prompt),
            params=params,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop) | (frozenset() if ignore_eos else {END_TOKEN}),
            seed=0,
            adapter_digest=adapter,
            adapter_bytes=ADAPTERS.get(adapter or "", 0),
            tenant=adapter or "",
        )
        self.requests[request.request_id] = request
        self.computed[request.request_id] = 0
        self.scheduler.add(request)
        self.steps_since_arrival = 0
        self.totals["requests"] += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        computed = {request_id for output in self.in_flight for request_id in output.request_ids} if in_flight else ()
        running = [request_id for request_id in computed or self.requests if self._is_unfinished(request_id)]
        request_id = data.draw(st.sampled_from(sorted(running or self.requests)))
        request = self.requests[request_id]
        was_running = request.finish_reason is None
        self.scheduler.finish(request_id, "abort")
        self.scheduler.finish("nobody", "abort")
        if was_running:
            self.aborted.add(request_id)
            assert request.finish_reason == "abort"
            self.totals["aborts"] += 1
        self._check_blocks()

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 3), succeeds=st.booleans())
    def end_load(self, which: int, succeeds: bool) -> None:
        digest = self.loading.pop(which % len(self.loading))
        if succeeds:
            self.residency.complete(digest, f"weights of {digest}")
            self.totals["loads"] += 1
            return
        self.residency.cancel(digest)
        unfinished = {request_id for request_id in self.requests if self._is_unfinished(request_id)}
        waiting = {request.request_id for request in self.scheduler.waiting_for(digest)}
        assert waiting == {name for name in unfinished if self.requests[name].adapter_digest == digest}
        for request_id in waiting:
            self.scheduler.finish(request_id, "abort")
            self.aborted.add(request_id)
        self.totals["failed loads"] += 1

    @rule(digest=st.sampled_from(sorted(ADAPTERS)))
    def offer(self, digest: str) -> None:
        """Somebody read it anyway."""
        resident = {other for other in ADAPTERS if self.residency.state(other) == "resident"}
        was_loading = self.residency.state(digest) == "loading"
        taken = self.residency.offer(digest, ADAPTERS[digest], f"weights of {digest}")
        assert not (taken and was_loading)
        assert resident | ({digest} if taken else set()) == {
            other for other in ADAPTERS if self.residency.state(other) == "resident"
        }

    @rule(digest=st.sampled_from(sorted(ADAPTERS)))
    def discard(self, digest: str) -> None:
        """Its name is gone; if nobody needs it, so is the adapter."""
        if (
            not any(
                request.adapter_digest == digest and request.finish_reason is None for request in self.requests.values()
            )
            and self.residency.state(digest) != "loading"
        ):
            self.residency.discard(digest)
            assert self.residency.state(digest) == "absent"

    @rule(
        count=st.integers(1, 3) | st.integers(1, 20),
        # Before which of the steps; the first stage, how many more, and steps in flight that others have computed.
        losses=st.dictionaries(
            st.integers(0, 8),
            st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 1]), st.integers(0, 3)),
            max_size=3,
        ),
    )
    def step(self, count: int, losses: dict[int, tuple[int, int, int]]) -> None:
        for number in range(count):
            if number in losses:
                self._lose(*losses[number])
            self._step()

    # Not before a step or two has gone well: otherwise there is little left to share.
    @precondition(lambda self: self.steps_since_arrival >= 2)
    @rule(share_written=st.sampled_from([0.0, 0.5, 1.0]))
    def step_that_fails(self, share_written: float) -> None:
        """Something breaks in the middle: some of the step's slots hold rubbish, and its requests are given up."""
        self._schedule()
        if not self.in_flight:
            return
        output = self.in_flight.popleft()
        for sequence, stages in self._parts(output):
            for group in range(len(self.windows)):
                for position in range(sequence.start, sequence.start + int(share_written * len(sequence.token_ids))):
                    slot = self._slot(sequence, group, position)
                    self.cache |= dict.fromkeys([(stage, group, slot) for stage in stages], RUBBISH)
                    self.journal |= dict.fromkeys([(stage, slot) for stage in stages if group == self._table], RUBBISH)
        for request_id in output.request_ids:
            if self._is_unfinished(request_id):
                self.scheduler.finish(request_id, "abort")
                self.aborted.add(request_id)
                self.totals["failures"] += 1
        self._check_blocks()

    @rule()
    def step_that_is_not_taken(self) -> None:
        """It cannot be begun, for a reason that has nothing to do with its requests."""
        self._schedule()
        if self.in_flight:
            self.scheduler.withdraw(self.in_flight.pop())
            self.totals["withdrawn"] += 1
        self._check_blocks()

    def _lose(self, first: int, more: int, num_computed: int) -> None:
        """The stages before those that are lost have computed some of the steps in flight, which nobody will end."""
        first = min(first, self.num_stages - 1)
        lost = StageRange(first=first, last=min(first + more, self.num_stages - 1), count=self.num_stages)
        for output in itertools.islice(self.in_flight, num_computed):
            for sequence, stages in self._parts(output):
                self._write(sequence, [stage for stage in stages if stage < lost.first])
        self.in_flight.clear()
        gone = range(lost.first, lost.last + 1)
        self.cache = {place: content for place, content in self.cache.items() if place[0] not in gone}
        self.journal = {place: content for place, content in self.journal.items() if place[0] not in gone}
        running = self.scheduler.num_running
        self.scheduler.drop_steps()
        self.scheduler.lose(lost)
        self.totals["losses"] += lost.is_everything
        self.totals["losses of some stages"] += not lost.is_everything
        assert self.scheduler.num_running == 0 or not lost.is_everything
        self.totals["kept after a loss"] += self.scheduler.num_running
        self.totals["given up after a loss of some stages"] += (not lost.is_everything) * (
            running - self.scheduler.num_running
        )
        self._check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_work or self.in_flight:
            self._step()
        assert self.residency.num_pinned == 0
        assert all(pool.num_free == pool.num_blocks for pool in self.pools)
        for request_id, request in self.requests.items():
            if request_id in self.aborted:
                continue
            expected = solo(request)
            assert request.output_token_ids == expected.token_ids
            assert request.finish_reason == expected.finish_reason
            assert request.stop_reason == expected.stop_reason

    def _step(self) -> None:
        self.steps_since_arrival += self._schedule()
        tokens = sum(request.num_tokens + request.max_tokens for request in self.requests.values())
        assert self.steps_since_arrival <= (tokens + 1) * (len(self.requests) + 1) * self.shape["num_in_flight"]
        if self.in_flight and (len(self.in_flight) == self.shape["num_in_flight"] or not self.was_scheduled):
            self._end_step(self.in_flight.popleft())

    def _schedule(self) -> bool:
        """Put one more step in flight, if there is room and something to do. Returns: whether there was any work."""
        had_work = self.scheduler.has_work
        assert had_work == any(map(self._is_unfinished, self.requests))
        resident = {digest for digest in ADAPTERS if self.residency.state(digest) == "resident"}
        output = self.scheduler.schedule()
        self.totals["steps"] += 1
        self._check_loads(output, resident)
        # Work is never left lying: whatever the pool's size, somebody moves, and nobody waits for ever.
        assert had_work or output.is_empty
        if had_work and output.is_empty and not self.in_flight:
            assert self.loading
            self.totals["steps without an adapter"] += 1
            digest = self.loading.pop(0)
            self.residency.complete(digest, f"weights of {digest}")
        self._check_step(output)
        self._check_blocks()
        self.was_scheduled = not output.is_empty
        if self.was_scheduled:
            self.in_flight.append(output)
            self.totals["steps beside another"] += len(self.in_flight) > 1
        return had_work

    def _end_step(self, output: SchedulerOutput) -> None:
        """Compute it, only now, and record it. Requests of it may have gone meanwhile, and others have their blocks."""
        running = {request_id for request_id in self.requests if self._is_unfinished(request_id)}
        sampled = {}
        for replay in output.replays:
            self._replay(self.requests[replay.sequence.request_id], replay)
        for sequence in output.sequences:
            request = self.requests[sequence.request_id]
            self._compute(request, sequence)
            if request.finish_reason is not None:
                self.totals["aborted in flight"] += 1
                continue
            self.totals["preempted in flight"] += not any(table.blocks for table in request.block_tables)
            if sequence.stop == request.num_tokens and request.max_tokens > 0:
                sampled[request.request_id] = next_token(request, request.output_token_ids)
        moved = {request.request_id for request in self.scheduler.update(output, sampled)}
        assert moved >= sampled.keys()
        assert {request_id for request_id in running if not self._is_unfinished(request_id)} <= moved
        self._check_blocks()

    def _is_unfinished(self, request_id: str) -> bool:
        return self.requests[request_id].finish_reason is None

    def _check_step(self, output: SchedulerOutput) -> None:
        replayed = [replay.sequence for replay in output.replays]
        sequences = [*output.sequences, *replayed]
        assert sum(len(sequence.token_ids) for sequence in sequences) <= self.shape["max_num_batched_tokens"]
        assert len(sequences) <= self.shape["max_num_seqs"]
        assert len(set(output.request_ids)) == len(sequences)
        others = {request_id for step in self.in_flight for request_id in step.request_ids}
        assert others.isdisjoint(output.request_ids)
        for part in (output.sequences, replayed):
            adapters = [digest for digest, _ in itertools.groupby(sequence.adapter_digest for sequence in part)]
            assert len(adapters) == len(set(adapters))
            assert None not in adapters[1:]

    def _check_loads(self, output: SchedulerOutput, resident: set[str]) -> None:
        for load in output.loads:
            assert self.residency.state(load.digest) == "loading"
            assert load.digest not in self.loading
            assert self.requests[load.request_id].adapter_digest == load.digest
            self.loading.append(load.digest)
        held = {digest: self.residency.state(digest) for digest in ADAPTERS}
        used = sum(ADAPTERS[digest] for digest, state in held.items() if state != "absent")
        assert self.residency.free_bytes == self.residency.max_bytes - used >= 0
        assert {digest for digest, state in held.items() if state == "loading"} == set(self.loading)
        self.totals["evictions"] += len([digest for digest in resident if held[digest] == "absent"])
        computing = {self.requests[request_id].adapter_digest for request_id in output.request_ids} - {None}
        for digest in computing:
            assert digest is not None
            assert self.residency.weights(digest) == f"weights of {digest}"
        running = [request for request in self.requests.values() if any(table.blocks for table in request.block_tables)]
        assert self.residency.num_pinned == len({request.adapter_digest for request in running} - {None})

    def _check_blocks(self) -> None:
        for group, pool in enumerate(self.pools):
            tables = [request.block_tables[group] for request in self.requests.values()]
            taken = {block for table in tables for block in table.blocks[table.num_dropped :]}
            assert DROPPED not in taken
            assert len(taken) + pool.num_free == pool.num_blocks
            for request in self.requests.values():
                table = request.block_tables[group]
                assert request.finish_reason is None or not table.blocks
                if (window := self.windows[group]) is not None:
                    held = len(table.blocks) - table.num_dropped
                    limit = blocks_for_window(window, block_size=self.block_size, chunk_tokens=self.chunk_tokens)
                    assert held <= limit

    def _compute(self, request: Request, sequence: ScheduledSequence) -> None:
        """Write the step's tokens to the simulated cache; everything before them must still be there."""
        known = (*request.prompt_token_ids, *request.output_token_ids)
        computed = self.computed[request.request_id]
        if sequence.start != computed:
            # Just admitted, or again after it was preempted: what the cache has need not be computed.
            reason = "recomputed" if len(known) - 1 in self.shape["length_regimes"].sequence_lens else "preemptions"
            self.totals[reason] += computed > 0
            self.totals["cached tokens"] += sequence.start
            assert sequence.start == 0 or self.shape["prefix_cache"]
            assert sequence.start % self.block_size == 0
        assert sequence.token_ids == known[sequence.start : sequence.stop]
        assert len(sequence.token_ids) > 0
        assert len(sequence.token_ids) <= self.chunk_tokens
        assert sequence.adapter_digest == request.adapter_digest
        wants_all = request.params.prompt_logprobs is not None and sequence.start < len(request.prompt_token_ids)
        assert sequence.num_logits == (len(sequence.token_ids) if wants_all else int(sequence.stop == len(known)))
        assert not wants_all or sequence.num_logits <= PROMPT_LOGITS_CHUNK
        self._write(sequence, range(self.num_stages))
        self.totals["blocks dropped"] += sum(table.count(DROPPED) for table in sequence.block_tables)
        self.computed[request.request_id] = sequence.stop

    def _replay(self, request: Request, replay: Replay) -> None:
        """Write tokens to the caches that lack them, from what the stage before gave for them."""
        sequence, stages = replay.sequence, replay.stages
        assert not stages.is_everything
        assert sequence.num_logits == 0
        assert 0 < len(sequence.token_ids) <= self.chunk_tokens
        assert sequence.token_ids == request.tokens(sequence.start, sequence.stop)
        if any(table.blocks for table in request.block_tables):
            assert sequence.stop <= request.num_computed_tokens
        if stages.first > 0:
            for position in range(sequence.start, sequence.stop):
                given = self.journal[stages.first - 1, self._slot(sequence, self._table, position)]
                assert given == self._content(sequence, position)
        self._write(sequence, range(stages.first, stages.last + 1))
        self.totals["replayed tokens"] += len(sequence.token_ids)

    def _parts(self, output: SchedulerOutput) -> list[tuple[ScheduledSequence, range]]:
        """What is in a step, and which stages compute it."""
        parts = [(sequence, range(self.num_stages)) for sequence in output.sequences]
        return parts + [
            (replay.sequence, range(replay.stages.first, replay.stages.last + 1)) for replay in output.replays
        ]

    def _write(self, sequence: ScheduledSequence, stages: Iterable[int]) -> None:
        """To the caches and journals of stages; in the caches everything that the tokens see must still be there."""
        contents = [self._content(sequence, position) for position in range(sequence.stop)]
        for stage in stages:
            for group, window in enumerate(self.windows):
                oldest = 0 if window is None else max(sequence.start + 1 - window, 0)
                slots = {position: self._slot(sequence, group, position) for position in range(oldest, sequence.stop)}
                for position in range(sequence.start, sequence.stop):
                    self.cache[stage, group, slots[position]] = contents[position]
                    if group == self._table:
                        self.journal[stage, slots[position]] = contents[position]
                for position, slot in slots.items():
                    assert self.cache[stage, group, slot] == contents[position]

    def _content(self, sequence: ScheduledSequence, position: int) -> Content:
        """A key or value follows from the tokens up to it, from the adapter, and from the regime."""
        request = self.requests[sequence.request_id]
        regime = self.shape["length_regimes"].regime(prompt_len=sequence.prompt_len, sequence_len=sequence.sequence_len)
        return request.adapter_digest, regime, request.tokens(0, position + 1)

    @property
    def _table(self) -> int:
        """Whose slots the journal goes by."""
        return farthest_group(self.windows)

    def _slot(self, sequence: ScheduledSequence, group: int, position: int) -> int:
        return sequence.block_tables[group][position // self.block_size] * self.block_size + position % self.block_size


def test_any_traffic_gives_every_request_its_solo_tokens_and_every_block_back() -> None:
    Traffic.totals.clear()
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Traffic.totals["steps"] >= 10_000
    # The run means nothing unless memory was short and clients left.
    for event, least in {
        "preemptions": 30,
        "aborts": 100,
        "failures": 5,
        "losses": 20,
        "losses of some stages": 300,
        "kept after a loss": 50,
        "given up after a loss of some stages": 5,
        "replayed tokens": 100,
        "withdrawn": 20,
        "steps beside another": 300,
        "aborted in flight": 3,
        "preempted in flight": 5,
        "recomputed": 5,
        "blocks dropped": 1_000,
        "cached tokens": 20,
        "evictions": 100,
        "steps without an adapter": 100,
        "failed loads": 3,
    }.items():
        assert Traffic.totals[event] >= least, (event, Traffic.totals)


def test_requests_start_in_the_order_they_came() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_seqs=2, max_num_batched_tokens=4)
    for name in ("first", "second", "third"):
        scheduler.add(make_request(name, prompt_len=4, max_tokens=1))
    order = []
    while scheduler.has_work:
        output = scheduler.schedule()
        order.extend(sequence.request_id for sequence in output.sequences if sequence.start == 0)
        done = {
            sequence.request_id: 1
            for sequence in output.sequences
            if sequence.stop == scheduler.get(sequence.request_id).num_tokens
        }
        scheduler.update(output, done)
    assert order == ["first", "second", "third"]


def test_the_youngest_request_gives_way_and_resumes_before_newer_ones() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=1, max_num_seqs=4, max_num_batched_tokens=16)
    requests = {name: make_request(name, prompt_len=2, max_tokens=2) for name in ("old", "young")}
    for request in requests.values():
        scheduler.add(request)
    first = scheduler.schedule()
    assert [sequence.request_id for sequence in first.sequences] == ["old", "young"]
    scheduler.update(first, {"old": 1, "young": 1})
    scheduler.add(make_request("newest", prompt_len=1, max_tokens=1))
    second = scheduler.schedule()
    assert [sequence.request_id for sequence in second.sequences] == ["old"]
    assert scheduler.num_running == 1
    assert scheduler.num_waiting == 2
    assert [table.blocks for table in requests["young"].block_tables] == [[]]
    scheduler.update(second, {"old": 1})
    third = scheduler.schedule()
    assert [(sequence.request_id, sequence.start) for sequence in third.sequences] == [("young", 0), ("newest", 0)]
    assert third.sequences[0].token_ids == (1, 1, 1)


def test_r093_a_long_prompt_leaves_a_place_in_every_step_to_those_that_decode() -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_request("stream", prompt_len=2, max_tokens=100))
    output = scheduler.schedule()
    scheduler.update(output, {"stream": 1})
    scheduler.add(make_request("long", prompt_len=300, max_tokens=1))
    steps = 0
    while scheduler.num_waiting or scheduler.get("long").num_computed_tokens < 299:
        output = scheduler.schedule()
        assert output.sequences[0].request_id == "stream"
        assert len(output.sequences[1].token_ids) == min(7, 300 - output.sequences[1].start)
        finished = {"stream": 1} | ({"long": 1} if output.sequences[1].stop == 300 else {})
        scheduler.update(output, finished)
        steps += 1
        if "long" in finished:
            break
    assert steps == 43


def test_a_request_that_grows_beyond_a_length_is_computed_anew_once() -> None:
    scheduler = make_scheduler(
        num_blocks=8,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        length_regimes=LengthRegimes(sequence_lens=frozenset({5})),
    )
    scheduler.add(make_request("grows", prompt_len=4, max_tokens=4))
    scheduler.add(make_request("longer", prompt_len=6, max_tokens=2))
    computed: list[tuple[str, int, int]] = []
    while scheduler.has_work:
        output = scheduler.schedule()
        computed += [(sequence.request_id, sequence.start, sequence.stop) for sequence in output.sequences]
        complete = [sequence for sequence in output.sequences if sequence.num_logits]
        scheduler.update(output, {sequence.request_id: 1 for sequence in complete})
    grows = [(start, stop) for name, start, stop in computed if name == "grows"]
    assert grows[:2] == [(0, 4), (4, 5)]
    assert grows[2][0] == 0
    assert grows[-2][1] == 6
    assert grows[-1] == (6, 7)
    assert [start for name, start, _ in computed if name == "longer"].count(0) == 1


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    length_regimes: LengthRegimes = ONE_REGIME,
    residency: Residency[str] | None = None,
    policy: SchedulingPolicy | None = None,
) -> Scheduler:
    group = CacheGroup(window=None, pool=BlockPool(num_blocks))
    blocks = CacheBlocks([group], block_size=block_size, chunk_tokens=max_num_batched_tokens)
    return Scheduler(
        blocks,
        residency=residency or Residency(0),
        policy=policy or FirstComeFirstServed(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=False,
        length_regimes=length_regimes,
    )


def make_request(
    name: str, *, prompt_len: int, max_tokens: int, adapter: str | None = None, num_bytes: int = 1, priority: int = 0
) -> Request:
    return Request(
        request_id=name,
        index=0,
        prompt_token_ids=(1,) * prompt_len,
        params=SamplingParams(max_tokens=max_tokens, priority=priority),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        adapter_digest=adapter,
        adapter_bytes=num_bytes,
        tenant=adapter or "",
    )


class HotTraffic:
    """Requests for resident adapters that never pause: as one ends, the next is there."""

    def __init__(self, *, policy: SchedulingPolicy, hot: dict[str, int], budget: int) -> None:
        self.residency: Residency[str] = Residency(budget)
        self.scheduler = make_scheduler(
            num_blocks=1000,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            residency=self.residency,
            policy=policy,
        )
        self.hot = hot
        self.started: dict[str, int] = {}
        self.generated: Counter[str] = Counter()
        self.steps = 0
        self._loading: list[str] = []
        self._count = 0

    def add(self, adapter: str, num_bytes: int, *, max_tokens: int | None = None) -> str:
        self._count += 1
        request = make_request(
            f"{adapter}-{self._count}",
            prompt_len=3,
            # Not in step with each other: at no moment do all end together.
            max_tokens=4 + self._count % 5 if max_tokens is None else max_tokens,
            adapter=adapter,
            num_bytes=num_bytes,
        )
        self.scheduler.add(request)
        return request.request_id

    def step(self) -> None:
        """One step, three waiting requests for each hot adapter before it; a load takes one step."""
        for adapter, num_bytes in self.hot.items():
            while len(self.scheduler.waiting_for(adapter)) < 3:
                self.add(adapter, num_bytes)
        for digest in self._loading:
            self.residency.complete(digest, digest)
        output = self.scheduler.schedule()
        self._loading = [load.digest for load in output.loads]
        self.steps += 1
        tokens = {}
        for sequence in output.sequences:
            self.started.setdefault(sequence.request_id, self.steps)
            if sequence.stop == self.scheduler.get(sequence.request_id).num_tokens:
                tokens[sequence.request_id] = 1
                self.generated[sequence.adapter_digest or ""] += 1
        self.scheduler.update(output, tokens)


# Sequences at once, and tokens of one.
MOST_STEPS_TO_DRAIN = 4 * 11


@pytest.mark.parametrize("policy", [FirstComeFirstServed, lambda: FairShare({})], ids=["fcfs", "fair"])
@pytest.mark.parametrize("cold_bytes", [1, 2, 4], ids=lambda size: f"needs-{size}-of-4")
def test_a_cold_adapter_starts_within_a_bounded_number_of_steps_under_hot_traffic(
    policy: Callable[[], SchedulingPolicy], cold_bytes: int
) -> None:
    traffic = HotTraffic(policy=policy(), hot={"a": 1, "b": 1, "c": 2}, budget=4)
    for _ in range(30):
        traffic.step()
    assert traffic.residency.free_bytes == 0
    for _ in range(5):
        asked = traffic.steps
        cold = traffic.add("cold", cold_bytes)
        while cold not in traffic.started:
            traffic.step()
            assert traffic.steps - asked <= 2 * MOST_STEPS_TO_DRAIN + 2
        for _ in range(40):
            traffic.step()
    assert min(traffic.generated[adapter] for adapter in ("a", "b", "c")) > 20


def test_requests_of_resident_adapters_pass_one_that_waits_for_its_adapter() -> None:
    traffic = HotTraffic(policy=FirstComeFirstServed(), hot={}, budget=2)
    first = traffic.add("cold", 1)
    traffic.residency.offer("warm", 1, "warm")
    second = traffic.add("warm", 1)
    traffic.step()
    assert traffic.started == {second: 1}
    traffic.step()
    assert traffic.started[first] == 2


def test_the_adapter_that_ends_soonest_makes_room_and_the_others_go_on_being_admitted() -> None:
    traffic = HotTraffic(policy=FirstComeFirstServed(), hot={}, budget=2)
    for adapter, max_tokens in (("long", 30), ("short", 4)):
        traffic.residency.offer(adapter, 1, adapter)
        traffic.add(adapter, 1, max_tokens=max_tokens)
    traffic.step()
    cold = traffic.add("cold", 1)
    again = {adapter: traffic.add(adapter, 1, max_tokens=2) for adapter in ("long", "short")}
    traffic.step()
    assert again["long"] in traffic.started
    while cold not in traffic.started:
        assert again["short"] not in traffic.started
        traffic.step()
    assert traffic.steps < 8
    while again["short"] not in traffic.started:
        traffic.step()
    assert traffic.started[again["short"]] > traffic.started[cold]


def test_an_adapter_that_an_earlier_request_waits_for_is_not_evicted_for_a_later_one() -> None:
    residency: Residency[str] = Residency(1)
    residency.offer("needed", 1, "needed")
    scheduler = make_scheduler(
        num_blocks=4, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, residency=residency
    )
    for name, adapter in (("running", None), ("next", "needed"), ("last", "other")):
        scheduler.add(make_request(name, prompt_len=2, max_tokens=2, adapter=adapter))
    output = scheduler.schedule()
    assert not output.loads
    assert residency.state("needed") == "resident"
    scheduler.update(output, {"running": 1})
    scheduler.finish("running", "abort")
    assert [sequence.request_id for sequence in scheduler.schedule().sequences] == ["next"]


@pytest.mark.parametrize(("shares", "ratio"), [({}, 1.0), ({"a": 3.0}, 3.0)])
def test_fair_scheduling_shares_tokens_between_adapters_however_many_requests_each_has(
    shares: dict[str, float], ratio: float
) -> None:
    traffic = HotTraffic(policy=FairShare(shares), hot={}, budget=2)
    for adapter in ("a", "b"):
        traffic.residency.offer(adapter, 1, adapter)
    for _ in range(200):
        traffic.add("b", 1)
    for _ in range(100):
        traffic.add("a", 1)
    for _ in range(150):
        traffic.step()
    assert abs(traffic.generated["a"] / traffic.generated["b"] / ratio - 1) < 0.15


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    traffic = HotTraffic(policy=FairShare({}), hot={}, budget=2)
    for adapter in ("a", "b"):
        traffic.residency.offer(adapter, 1, adapter)
    for _ in range(100):
        traffic.add("b", 1)
    for _ in range(60):
        traffic.step()
    assert not traffic.generated["a"]
    before = traffic.generated["b"]
    for _ in range(100):
        traffic.add("a", 1)
    for _ in range(80):
        traffic.step()
    assert abs(traffic.generated["a"] / (traffic.generated["b"] - before) - 1) < 0.25


@pytest.mark.parametrize("policy", [FirstComeFirstServed(), FairShare({})], ids=["fcfs", "fair"])
def test_a_lower_priority_is_served_first_and_preempted_last(policy: SchedulingPolicy) -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=1, max_num_seqs=3, max_num_batched_tokens=16, policy=policy)
    scheduler.add(make_request("late", prompt_len=2, max_tokens=2, priority=1))
    scheduler.add(make_request("urgent", prompt_len=2, max_tokens=2, priority=-1))
    scheduler.add(make_request("usual", prompt_len=2, max_tokens=2))
    first = scheduler.schedule()
    assert [sequence.request_id for sequence in first.sequences] == ["urgent", "usual"]
    scheduler.update(first, {"urgent": 1, "usual": 1})
    second = scheduler.schedule()
    assert [sequence.request_id for sequence in second.sequences] == ["urgent"]
    scheduler.update(second, {"urgent": 1})
    assert [sequence.request_id for sequence in scheduler.schedule().sequences] == ["usual"]
