"""An executor that sends steps through the stages, several at a time, and replaces stages that are lost.

Every stage is told of a step at once, and begins it when the stage before has answered: what that gave goes from worker
to worker. Each stage serves its calls in the order in which they were made, so steps stay in order everywhere.

Keys and values never travel. What a lost worker had is computed again by the one that replaces it, and by no other: its
stage is given what the stage before kept of what it gave (the activation journal), the first one the tokens. Where that
cannot be done, all stages compute all tokens again (the token journal, which the engine keeps in any case).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import TypeVar

from torch import Tensor

from graftlm.adapters import Adapter, LoadedAdapter
from graftlm.distributed.drain import Replacement, chosen_stages, least_busy
from graftlm.distributed.messages import (
    AdapterRecipe,
    StageDescription,
    StagePlan,
    StageReply,
    StageReport,
    StageStep,
    StepKey,
)
from graftlm.distributed.span_balance import SpanBalance
from graftlm.distributed.stack_passes import stack_passes
from graftlm.distributed.stage import StepRefused
from graftlm.distributed.worker import Call, Worker, WorkerLost, WorkerPool
from graftlm.engine.batch_builder import by_layers
from graftlm.engine.executor import (
    AdapterUnavailable,
    BetweenSteps,
    CacheLost,
    MovedStage,
    WorkerInfo,
    WorkerWork,
)
from graftlm.engine.logits import in_order
from graftlm.engine.residency import Residency
from graftlm.engine.scheduler import Replay, ScheduledSequence
from graftlm.engine.stage_range import StageRange
from graftlm.errors import AdapterError, DrainFailed, EngineClosed

logger = logging.getLogger(__name__)

# Importing torch, reading weights from a cold disk.
LOAD_SECONDS = 900.0
# A step that takes a worker along every time would do so for ever.
MAX_LOSSES_IN_A_ROW = 3

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


@dataclass(kw_only=True, eq=False)
class _Member:
    """A worker that has its stage. adapters: digest -> name of those it was told to have; None if they do not concern
    it."""

    worker: Worker
    plan: StagePlan
    description: StageDescription
    adapters: dict[str, str | None] = field(default_factory=dict)
    work: WorkerWork = field(default_factory=WorkerWork)

    def note(self, report: StageReport, idle_seconds: float) -> None:
        """Count a step."""
        before = self.work
        self.work = WorkerWork(
            num_steps=before.num_steps + 1,
            num_tokens=before.num_tokens + report.num_tokens,
            num_replayed_tokens=before.num_replayed_tokens + report.num_replayed_tokens,
            compute_seconds=before.compute_seconds + report.compute_seconds,
            idle_seconds=before.idle_seconds + idle_seconds,
            hop_bytes=before.hop_bytes + report.hop_bytes,
            adapter_bytes=report.adapter_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class SentStep:
    """Sequences that run through the same layers. key: of the last pass through the stages. calls: of the stages, in
    order, for each pass. begun: when it was sent, in seconds of `time.monotonic`. has_stack: whether the layers are
    others than the decoder's own."""

    key: StepKey
    calls: tuple[Call[StageReply], ...]
    begun: float
    has_stack: bool


class PipelineStep:
    """`StepInFlight` of a pipeline. sent, members: for each stack of layers what was sent, and which of the sequences
    that was for. row_counts: how many logits each sequence wants."""

    def __init__(
        self,
        pipeline: PipelineExecutor,
        sent: Sequence[SentStep],
        members: Sequence[Sequence[int]],
        row_counts: Sequence[int],
    ) -> None:
        self._pipeline = pipeline
        self._sent = sent
        self._members = members
        self._row_counts = row_counts

    def logits(self) -> Tensor:
        # The decoder's own layers last: after their step they may be shared out anew, and what is in flight is lost.
        parts = [self._pipeline.finish(sent) for sent in reversed(self._sent)][::-1]
        return parts[0] if len(parts) == 1 else in_order(parts, self._members, self._row_counts)


class PipelineExecutor:
    """`Executor` over workers. They read adapters' weights themselves, and have none that the engine has let go.

    Args:
        plans: of the stages, in order. workers: for them, or as many as have been taken already.
        balance: says when layers are shared out anew; None: never. residency: where the adapters are.
        depth: steps in flight at once. patience_seconds: how long a worker may give no sign of life.

    Raises:
        CheckpointError, ConfigurationError: a stage cannot be loaded.
        EngineClosed: workers are lost while they load.
    """

    def __init__(
        self,
        pool: WorkerPool,
        plans: Sequence[StagePlan],
        *,
        workers: Sequence[Worker] = (),
        balance: SpanBalance | None = None,
        residency: Residency[LoadedAdapter],
        depth: int,
        patience_seconds: float,
    ) -> None:
        self._pool = pool
        self._plans = tuple(plans)
        # They have no stage yet.
        self._waiting = dict(enumerate(workers))
        self._balance = balance
        self.depth = depth
        self._patience_seconds = patience_seconds
        self._members: dict[int, _Member] = {}
        # Stages that have been loaded since the engine was last told of it.
        self._empty: set[int] = set()
        self._key = StepKey(epoch=0, number=0)
        self._is_ready = False
        self._losses = 0
        self._load_seconds = 0.0
        self.num_lost_workers = 0
        self.num_moves = 0
        self._residency = residency
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        try:
            self.recover()
        except BaseException:
            self.close()
            raise
        self._losses = 0

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        with self._lock:
            members = sorted(self._members.items())
        needed = self._residency.resident
        running = [info for _, member in members for info in self._describe(member, needed)]
        return (*running, *self._pool.spares)

    def submit(self, sequences: Sequence[ScheduledSequence], replays: Sequence[Replay] = ()) -> PipelineStep:
        if not self._is_ready:
            raise CacheLost("workers are missing")
        try:
            self._forget_adapters()
            computed = (*sequences, *(replay.sequence for replay in replays))
            for digest in dict.fromkeys(sequence.adapter_digest for sequence in computed):
                if digest is not None:
                    self._ensure_adapter(self._residency.weights(digest).adapter)
        except WorkerLost as lost:
            raise CacheLost(str(lost)) from lost
        groups = self._by_stack(sequences)
        if replays:
            groups.setdefault(None, [])
        # What goes through the stages once need not wait for what goes back and forth.
        stacks = sorted(groups, key=lambda layers: layers is not None)
        sent = [
            self._send(
                tuple(sequences[index] for index in groups[layers]), () if layers is not None else replays, layers
            )
            for layers in stacks
        ]
        return PipelineStep(
            self, sent, [groups[layers] for layers in stacks], [sequence.num_logits for sequence in sequences]
        )

    def finish(self, sent: SentStep) -> Tensor:
        """The logits of a step, earlier ones having been asked for. As `StepInFlight.logits`."""
        if not self._is_ready or sent.key.epoch != self._key.epoch:
            raise CacheLost("workers were lost meanwhile")
        try:
            reply = self._answer_of_all(sent)
        except WorkerLost as lost:
            raise CacheLost(str(lost)) from lost
        except Exception:
            # No stage goes on from a step that another did not compute.
            self._is_ready = False
            raise
        self._losses = 0
        self._note(reply, time.monotonic() - sent.begun)
        # How long a stage takes says how fast it is where every layer is computed once.
        if not sent.has_stack:
            self._rebalance(reply)
        return reply.output.unpack()

    def recover(self) -> StageRange | None:
        while True:
            self._losses += 1
            if self._losses > MAX_LOSSES_IN_A_ROW:
                self._losses = 0
                raise EngineClosed(
                    "workers are lost again and again",
                    do="look at their memory and their logs; requests may be sent again",
                )
            try:
                self._fill_gaps()
                self._begin_epoch()
            except WorkerLost as lost:
                logger.warning("lost while recovering: %s", lost)
            else:
                self._pool.keep_spares({member.description.node for member in self._members.values()})
                self._is_ready = True
                return self._take_empty()

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        # Of two at a time each might go where the other is to leave.
        with self._draining:
            with self._lock:
                members = dict(self._members)
            choice = chosen_stages(
                target,
                {index: (member.worker.id, member.description) for index, member in members.items()},
                self._pool.nodes,
            )
            if choice.node is not None:
                self._pool.vacate(choice.node)
            try:
                replacements = self._load_replacements({index: members[index] for index in choice.stages})
            except BaseException:
                if choice.node is not None:
                    self._pool.readmit(choice.node)
                raise
            replaced: list[Replacement] = []
            try:
                between_steps(lambda: replaced.extend(self._replace(replacements)))
            except BaseException:
                for replacement in replacements:
                    replacement.new.kill()
                raise
            for replacement in replaced:
                replacement.old.retire(self._patience_seconds)
            return tuple(replacement.moved for replacement in replaced)

    def close(self) -> None:
        self._is_ready = False
        with self._lock:
            members = list(self._members.values())
            self._members.clear()
        for worker in (*(member.worker for member in members), *self._waiting.values()):
            worker.kill()
        self._pool.close()

    def _describe(self, member: _Member, needed: Set[str]) -> list[WorkerInfo]:
        """Each process that has the stage or a share of it."""
        known, span = dict(member.adapters), member.plan.span
        places = (member.description, *member.description.others)
        return [
            WorkerInfo(
                id=member.worker.id if rank == 0 else f"{member.worker.id}.{rank}",
                node=place.node,
                pid=place.pid,
                layers=(span.start, span.stop),
                rank=rank if len(places) > 1 else None,
                work=member.work if rank == 0 else None,
                adapters=tuple(name for digest, name in known.items() if name is not None and digest in needed),
                state="running",
            )
            for rank, place in enumerate(places)
        ]

    def _take_empty(self) -> StageRange | None:
        empty, self._empty = sorted(self._empty), set()
        if not empty:
            return None
        count = len(self._plans)
        if not self._plans[0].config.activation_journal:
            return StageRange(first=0, last=count - 1, count=count)
        return StageRange(first=empty[0], last=empty[-1], count=count)

    def _fill_gaps(self) -> None:
        """Have a worker for every stage, with its layers; those that lack them load at the same time."""
        loading: list[tuple[int, Worker, Call[StageDescription]]] = []
        for index, plan in enumerate(self._plans):
            if index not in self._members or self._members[index].plan.span != plan.span:
                worker = self._worker_for(index)
                loading.append((index, worker, worker.load(plan)))
        begun = time.monotonic()
        for position, (index, worker, call) in enumerate(loading):
            try:
                description = call.result(LOAD_SECONDS)
            except BaseException:
                for _, other, _ in loading[position:]:
                    other.kill()
                raise
            member = _Member(worker=worker, plan=self._plans[index], description=description)
            with self._lock:
                self._members[index] = member
            self._empty.add(index)
            start, stop = member.plan.span.start, member.plan.span.stop
            logger.info("layers %d to %d are on %s, process %d", start, stop - 1, description.node, description.pid)
        if loading:
            self._load_seconds = time.monotonic() - begun

    def _worker_for(self, index: int) -> Worker:
        """The one that has the stage, with other layers than it should, or else another."""
        with self._lock:
            member = self._members.pop(index, None)
        if member is not None:
            return member.worker
        if index in self._waiting:
            return self._waiting.pop(index)
        if self._balance is not None:
            self._balance.forget()
        return self._pool.take(self._busy())

    def _busy(self) -> Mapping[str, int]:
        """Stages by node."""
        with self._lock:
            return Counter(member.description.node for member in self._members.values())

    def _load_replacements(self, members: Mapping[int, _Member]) -> list[Replacement]:
        """Other workers with the layers that these have, while these go on.

        Raises:
            DrainFailed: there is nowhere to go, or what is there fails.
        """
        if not members:
            return []
        nodes = least_busy(self._pool.nodes, self._busy(), len(members))
        if not nodes:
            raise DrainFailed("there is no other node that could take the layers", do="let one join the cluster first")
        self._pool.keep_spares(nodes)
        loading: list[tuple[int, _Member, Worker, Call[StageDescription]]] = []
        try:
            for index, member in members.items():
                worker = self._pool.take(self._busy())
                loading.append((index, member, worker, worker.load(member.plan)))
            return [
                Replacement(
                    index=index, old=member.worker, new=worker, plan=member.plan, description=call.result(LOAD_SECONDS)
                )
                for index, member, worker, call in loading
            ]
        except BaseException as error:
            for _, _, worker, _ in loading:
                worker.kill()
            if isinstance(error, WorkerLost):
                raise DrainFailed("a worker that was to take the layers is lost", got=error) from error
            raise

    def _replace(self, replacements: Sequence[Replacement]) -> list[Replacement]:
        """Have other workers from the next step on, which begins a new epoch. Those that are in the way no more, or
        whose layers are others by now, are left as they are.

        Returns: what was replaced.
        """
        replaced = []
        for replacement in replacements:
            member = self._members.get(replacement.index)
            if (
                member is None
                or member.worker is not replacement.old
                or self._plans[replacement.index] != replacement.plan
            ):
                replacement.new.kill()
                continue
            self._is_ready = False
            with self._lock:
                self._members[replacement.index] = _Member(
                    worker=replacement.new, plan=replacement.plan, description=replacement.description
                )
            self._empty.add(replacement.index)
            self.num_moves += 1
            replaced.append(replacement)
        if replaced and self._balance is not None:
            self._balance.forget()
        self._pool.keep_spares({member.description.node for member in self._members.values()})
        return replaced

    def _rebalance(self, reply: StageReply) -> None:
        """Share the layers out anew from the next step on if that pays."""
        if self._balance is None:
            return
        spans = self._balance.note(
            [report.compute_seconds for report in reply.reports],
            spans=[plan.span for plan in self._plans],
            descriptions=[self._members[index].description for index in range(len(self._plans))],
            reload_seconds=self._load_seconds,
        )
        if spans is not None:
            logger.info("layers move: from now on %s", ", ".join(f"{span.start} to {span.stop - 1}" for span in spans))
            self._plans = tuple(replace(plan, span=span) for plan, span in zip(self._plans, spans, strict=True))
            self.num_moves += sum(member.plan.span != spans[index] for index, member in self._members.items())
            self._is_ready = False

    def _begin_epoch(self) -> None:
        self._key = StepKey(epoch=self._key.epoch + 1, number=0)
        begun = [(index, member.worker.begin(self._key.epoch)) for index, member in sorted(self._members.items())]
        for index, call in begun:
            self._answer(index, call)

    def _by_stack(self, sequences: Sequence[ScheduledSequence]) -> dict[tuple[int, ...] | None, list[int]]:
        """Which sequences run through which layers."""
        digests = {sequence.adapter_digest for sequence in sequences}
        adapters = {digest: self._residency.weights(digest).weights for digest in digests if digest is not None}
        return by_layers(sequences, adapters)

    def _send(
        self, sequences: tuple[ScheduledSequence, ...], replays: Sequence[Replay], layers: tuple[int, ...] | None
    ) -> SentStep:
        """layers: that the sequences run through, if not the decoder's own. Each pass is a step to the stages."""
        passes: tuple[tuple[range | None, ...], ...] = ((None,) * len(self._plans),)
        if layers is not None:
            passes = stack_passes(layers, [plan.span for plan in self._plans])
        calls: list[Call[StageReply]] = []
        after: StepKey | None = None
        begun = time.monotonic()
        for stages in passes:
            self._key = StepKey(epoch=self._key.epoch, number=self._key.number + 1)
            for index, depths in enumerate(stages):
                step = StageStep(
                    key=self._key,
                    sequences=sequences,
                    after=after,
                    depths=depths,
                    replays=_replayed_by(index, replays),
                    recalled=_replayed_by(index + 1, replays),
                )
                calls.append(self._members[index].worker.step(step, calls[-1].promise if calls else None))
                after = self._key
        return SentStep(key=self._key, calls=tuple(calls), begun=begun, has_stack=layers is not None)

    def _answer_of_all(self, sent: SentStep) -> StageReply:
        """What the last stage replied, once none of them is at it any more."""
        for index, call in self._by_stage(sent.calls):
            self._or_lose(index, partial(call.wait, self._patience_seconds))
        try:
            return sent.calls[-1].result(self._patience_seconds)
        except Exception:
            # Whatever went wrong in one of them came down to the last.
            for index, call in self._by_stage(sent.calls):
                self._answer(index, call)
            raise

    def _note(self, reply: StageReply, seconds: float) -> None:
        """Count a step that was answered so long after it was sent."""
        for number, (index, report) in enumerate(self._by_stage(reply.reports)):
            # What went by before this stage began, at most: it waited for this step no longer than that.
            before = seconds - sum(later.compute_seconds for later in reply.reports[number:])
            self._members[index].note(report, max(0.0, min(report.waited_seconds, before)))

    def _by_stage(self, items: Iterable[_Item]) -> Iterator[tuple[int, _Item]]:
        """Beside what came from the stages, in one or more passes, the stages' indices."""
        return zip(cycle(range(len(self._plans))), items, strict=False)

    def _answer(self, index: int, call: Call[_Answer], patience_seconds: float | None = None) -> _Answer:
        """A worker's answer; without one it is given up."""
        patience = self._patience_seconds if patience_seconds is None else patience_seconds
        return self._or_lose(index, partial(call.result, patience))

    def _or_lose(self, index: int, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (WorkerLost, StepRefused) as lost:
            logger.warning("worker %s is lost: %s", self._members[index].worker.id, lost)
            self._lose(index)
            raise WorkerLost(str(lost)) from lost

    def _lose(self, index: int) -> None:
        self._is_ready = False
        with self._lock:
            member = self._members.pop(index)
        self.num_lost_workers += 1 + len(member.description.others)
        member.worker.kill()

    def _ensure_adapter(self, adapter: Adapter) -> None:
        """Have every stage know an adapter; those that do not yet read it at the same time."""
        recipe = AdapterRecipe.of(adapter)
        asked = [
            (index, member, member.worker.ensure_adapter(recipe))
            for index, member in sorted(self._members.items())
            if adapter.digest not in member.adapters
        ]
        failure: AdapterError | None = None
        for index, member, call in asked:
            try:
                concerned = self._answer(index, call, LOAD_SECONDS)
            except AdapterError as error:
                failure = error
            else:
                member.adapters[adapter.digest] = adapter.name if concerned else None
        if failure is not None:
            raise AdapterUnavailable(adapter.digest, failure)

    def _forget_adapters(self) -> None:
        needed = self._residency.resident
        for _, member in sorted(self._members.items()):
            if gone := [digest for digest in member.adapters if digest not in needed]:
                # After the steps in flight, which may still need them.
                member.worker.forget_adapters(gone)
                for digest in gone:
                    del member.adapters[digest]


def _replayed_by(stage: int, replays: Sequence[Replay]) -> tuple[ScheduledSequence, ...]:
    return tuple(replay.sequence for replay in replays if replay.stages.first <= stage <= replay.stages.last)
