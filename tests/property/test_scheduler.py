"""Random traffic over the scheduler and a small block pool; the model is a pure function of the tokens so far."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from graftlm import SamplingParams
from graftlm.engine.block_pool import BlockPool
from graftlm.engine.cache_blocks import DROPPED, CacheBlocks, CacheGroup, blocks_for_window
from graftlm.engine.request import Request
from graftlm.engine.scheduler import PROMPT_LOGITS_CHUNK, ScheduledSequence, Scheduler, SchedulerOutput
from graftlm.models.length_regimes import LengthRegimes, Regime

VOCAB = 31
TOKENS = st.integers(0, VOCAB - 1)
END_TOKEN = 0


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


class Traffic(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; every step is checked against a simulated cache."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.integers(2, 8),
        windows=st.sampled_from([(None,), (None,), (None, 3), (4,), (2, None, 7)]),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6) | st.just(6),
        max_num_batched_tokens=st.integers(1, 24) | st.just(16),
        chunk_tokens=st.just(24) | st.integers(1, 9),
        prefix_cache=st.sampled_from([True, True, False]),
        length_regimes=st.sampled_from([ONE_REGIME, ONE_REGIME, GROWING, LONG_PROMPTS]),
    )
    def build(self, **shape: Any) -> None:
        num_blocks = shape.pop("num_blocks")
        self.shape = shape
        self.windows: tuple[int | None, ...] = shape.pop("windows")
        placement = {"block_size": shape.pop("block_size"), "chunk_tokens": shape.pop("chunk_tokens")}
        self.block_size, self.chunk_tokens = placement["block_size"], placement["chunk_tokens"]
        # Just enough for one sequence, and what short ones have in common with the other groups.
        most = [window if window is None else blocks_for_window(window, **placement) for window in self.windows]
        self.pools = [BlockPool(num_blocks if blocks is None else min(num_blocks, blocks)) for blocks in most]
        groups = [CacheGroup(window=window, pool=pool) for window, pool in zip(self.windows, self.pools, strict=True)]
        self.scheduler = Scheduler(CacheBlocks(groups, **placement), **shape)
        limits = [
            pool.num_blocks
            for pool, blocks in zip(self.pools, most, strict=True)
            if blocks is None or pool.num_blocks < blocks
        ]
        self.capacity = min(limits, default=20) * self.block_size
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.computed: dict[str, int] = {}
        self.cache: dict[tuple[int, int], tuple[str | None, Regime, tuple[int, ...]]] = {}
        self.steps_since_arrival = 0

    @rule(
        # Short prompts with long answers outgrow the pool together; long ones come in chunks; some begin alike.
        prompt=st.lists(TOKENS, min_size=1, max_size=4)
        | st.lists(TOKENS, min_size=5, max_size=30)
        | st.lists(st.integers(1, 2), min_size=1, max_size=2).map(lambda end: [*range(1, 20), *end])
        | st.lists(st.integers(1, 2), min_size=1, max_size=2).map(lambda end: [*range(1, 12), *end]),
        max_tokens=st.integers(0, 2) | st.integers(10, 30),
        min_tokens=st.integers(0, 3),
        adapter=st.sampled_from([None, "a", "b"]),
        stop=st.sampled_from([(), (3,), (3, 4)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        adapter: str | None,
        stop: tuple[int, ...],
        ignore_eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        prompt = prompt[: self.capacity]
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop,
            prompt_logprobs=prompt_logprobs,
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
        )
        self.requests[request.request_id] = request
        self.computed[request.request_id] = 0
        self.scheduler.add(request)
        self.steps_since_arrival = 0
        self.totals["requests"] += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[request_id]
        was_running = request.finish_reason is None
        self.scheduler.finish(request_id, "abort")
        if was_running:
            self.aborted.add(request_id)
            assert request.finish_reason == "abort"
            self.totals["aborts"] += 1
        self._check_blocks()

    @rule()
    def abort_unknown(self) -> None:
        self.scheduler.finish("nobody", "abort")

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    # Not before a step or two has gone well: otherwise there is little left to share.
    @precondition(lambda self: self.steps_since_arrival >= 2)
    @rule(share_written=st.sampled_from([0.0, 0.5, 1.0]))
    def step_that_fails(self, share_written: float) -> None:
        """Something breaks in the middle: some of the step's slots hold rubbish, and its requests are given up."""
        output = self.scheduler.schedule()
        self.totals["steps"] += 1
        for sequence in output.sequences:
            for group in range(len(self.windows)):
                for position in range(sequence.start, sequence.start + int(share_written * len(sequence.token_ids))):
                    self.cache[group, self._slot(sequence, group, position)] = ("rubbish", ONE_REGIME, ())
        for sequence in output.sequences:
            self.scheduler.finish(sequence.request_id, "abort")
            self.aborted.add(sequence.request_id)
            self.totals["failures"] += 1
        self._check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_work:
            self._step()
        assert all(pool.num_free == pool.num_blocks for pool in self.pools)
        for request_id, request in self.requests.items():
            if request_id in self.aborted:
                continue
            expected = solo(request)
            assert request.output_token_ids == expected.token_ids
            assert request.finish_reason == expected.finish_reason
            assert request.stop_reason == expected.stop_reason

    def _step(self) -> None:
        had_work = self.scheduler.has_work
        running = {request_id for request_id in self.requests if self._is_unfinished(request_id)}
        assert had_work == bool(running)
        output = self.scheduler.schedule()
        self.totals["steps"] += 1
        # Work is never left lying: whatever the pool's size, somebody moves, and nobody waits for ever.
        assert bool(output.sequences) == had_work
        self.steps_since_arrival += had_work
        tokens = sum(request.num_tokens + request.max_tokens for request in self.requests.values())
        assert self.steps_since_arrival <= (tokens + 1) * (len(self.requests) + 1)
        self._check_step(output)
        self._check_blocks()
        sampled = {}
        for sequence in output.sequences:
            request = self.requests[sequence.request_id]
            self._compute(request, sequence)
            if sequence.stop == request.num_tokens and request.max_tokens > 0:
                sampled[request.request_id] = next_token(request, request.output_token_ids)
        moved = {request.request_id for request in self.scheduler.update(output, sampled)}
        assert moved >= sampled.keys()
        assert {request_id for request_id in running if not self._is_unfinished(request_id)} <= moved
        self._check_blocks()

    def _is_unfinished(self, request_id: str) -> bool:
        return self.requests[request_id].finish_reason is None

    def _check_step(self, output: SchedulerOutput) -> None:
        sequences = output.sequences
        assert sum(len(sequence.token_ids) for sequence in sequences) <= self.shape["max_num_batched_tokens"]
        assert len(sequences) <= self.shape["max_num_seqs"]
        assert len({sequence.request_id for sequence in sequences}) == len(sequences)
        adapters = [digest for digest, _ in itertools.groupby(sequence.adapter_digest for sequence in sequences)]
        assert len(adapters) == len(set(adapters))
        assert None not in adapters[1:]

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
        lengths = {"prompt_len": len(request.prompt_token_ids), "sequence_len": len(known)}
        regime = self.shape["length_regimes"].regime(**lengths)
        for group, window in enumerate(self.windows):
            oldest = 0 if window is None else max(sequence.start + 1 - window, 0)
            table = sequence.block_tables[group]
            slots = {position: self._slot(sequence, group, position) for position in range(oldest, sequence.stop)}
            # A key or value follows from the tokens up to it, from the adapter, and from the regime.
            for position in range(sequence.start, sequence.stop):
                self.cache[group, slots[position]] = (request.adapter_digest, regime, known[: position + 1])
            for position, slot in slots.items():
                assert self.cache[group, slot] == (request.adapter_digest, regime, known[: position + 1])
            self.totals["blocks dropped"] += table.count(DROPPED)
        self.computed[request.request_id] = sequence.stop

    def _slot(self, sequence: ScheduledSequence, group: int, position: int) -> int:
        return sequence.block_tables[group][position // self.block_size] * self.block_size + position % self.block_size


def test_any_traffic_gives_every_request_its_solo_tokens_and_every_block_back() -> None:
    Traffic.totals.clear()
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=400,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Traffic.totals["steps"] >= 10_000
    # The run means nothing unless memory was short and clients left.
    assert Traffic.totals["preemptions"] >= 100
    assert Traffic.totals["aborts"] >= 200
    assert Traffic.totals["failures"] >= 50
    assert Traffic.totals["recomputed"] >= 50
    assert Traffic.totals["blocks dropped"] >= 1_000
    assert Traffic.totals["cached tokens"] >= 100


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
) -> Scheduler:
    group = CacheGroup(window=None, pool=BlockPool(num_blocks))
    blocks = CacheBlocks([group], block_size=block_size, chunk_tokens=max_num_batched_tokens)
    return Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=False,
        length_regimes=length_regimes,
    )


def make_request(name: str, *, prompt_len: int, max_tokens: int) -> Request:
    return Request(
        request_id=name,
        index=0,
        prompt_token_ids=(1,) * prompt_len,
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
    )
