"""The replicas themselves: started, listened to, replaced, and chosen among. Knows nothing of the jobs they are sent.

Each replica has a thread here. Everything may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from graftlm.adapters import AdapterRegistry
from graftlm.config import EngineConfig
from graftlm.distributed.messages import AdapterRecipe, StageDescription
from graftlm.distributed.replica_messages import ReplicaEvent, ReplicaNews, ReplicaRequest, ReplicaStatus
from graftlm.distributed.replica_residency import ReplicaResidency
from graftlm.distributed.worker import Call, WorkerLost
from graftlm.engine.executor import MovedStage, WorkerInfo
from graftlm.errors import EngineClosed, ObjectNotFound
from graftlm.routing.expected_completion import ExpectedCompletion
from graftlm.routing.homes import AdapterHomes
from graftlm.routing.prefix_index import PrefixIndex
from graftlm.routing.worker_table import RoutedRequest, WorkerTable

logger = logging.getLogger(__name__)

# Importing torch, reading weights from a cold disk.
LOAD_SECONDS = 900.0
# Of a replica that cannot be started again: the first wait, doubled each time, and the longest.
RETRY_SECONDS = (1.0, 60.0)
# Adapters that a replica is told at once to read in advance.
MAX_PREPARED = 4


class ReplicaHandle(Protocol):
    """A process with a replica in it."""

    @property
    def id(self) -> str: ...

    def load(self, config: EngineConfig) -> Call[StageDescription]: ...

    def submit(self, request: ReplicaRequest) -> None: ...

    def abort(self, job_id: str) -> None: ...

    def poll(self, forget: Sequence[str], prepare: Sequence[AdapterRecipe]) -> Call[ReplicaNews]: ...

    def drain(self, target: str) -> Call[tuple[MovedStage, ...]]:
        """Have layers leave one of its workers, or a node."""
        ...

    def retire(self, patience_seconds: float) -> None:
        """Have the process end by itself, and kill it if it does not."""
        ...

    def kill(self) -> None: ...


class ReplicaPool(Protocol):
    """Where replicas come from."""

    def start(self, replica_id: str, busy: Mapping[str, int]) -> ReplicaHandle:
        """A process that has loaded nothing, as soon as can be.

        Args:
            busy: node -> replicas there; of several spares the one with the fewest beside it is taken.
        """
        ...

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where it could have replicas."""
        ...

    @property
    def vacated(self) -> frozenset[str]:
        """Where it starts nothing."""
        ...

    def vacate(self, node: str) -> None:
        """Have no spares on a node, and start nothing there from now on."""
        ...

    def readmit(self, node: str) -> None:
        """Undo `vacate`."""
        ...

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        """Processes that are no replicas yet. May be read from any thread."""
        ...

    def keep_spares(self, nodes: Iterable[str]) -> None:
        """Have a spare on each of these nodes, soon."""
        ...

    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Member:
    """A replica that takes jobs, until it drains. status: as it said last. prepared: digests that it was told to read
    in advance."""

    handle: ReplicaHandle
    description: StageDescription
    status: ReplicaStatus
    is_draining: bool = False
    prepared: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A replica can be chosen."""

    member: Member


@dataclass(frozen=True, kw_only=True, eq=False)
class Lost:
    """A replica is gone, and with it what it was sent."""

    member: Member


@dataclass(frozen=True, kw_only=True, eq=False)
class Said:
    """A replica has told something of a job."""

    member: Member
    event: ReplicaEvent


GroupEvent = Joined | Lost | Said


class ReplicaGroup:
    """As many replicas as the config says.

    Args:
        config: of the whole. replica_config: of each replica. registry: which adapters are needed.
        tell: called in the replicas' threads with what happens.

    Raises:
        ConfigurationError, CheckpointError: a replica cannot be loaded.
        EngineClosed: one is lost while it loads.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        config: EngineConfig,
        replica_config: EngineConfig,
        *,
        registry: AdapterRegistry,
        residency: ReplicaResidency,
        tell: Callable[[GroupEvent], None],
    ) -> None:
        self._pool = pool
        self._config = config
        self._replica_config = replica_config
        self._registry = registry
        self._residency = residency
        self._tell = tell
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        # Others have their ids already.
        self._draining: list[Member] = []
        self._table = WorkerTable()
        self._homes = AdapterHomes()
        self._prefixes = PrefixIndex()
        self._policy = ExpectedCompletion(clock=time.monotonic, homes=self._homes, prefixes=self._prefixes)
        # Of replicas that are gone, and theirs.
        self._num_lost = self._num_moves = 0
        self._closing = threading.Event()
        self._handles: set[ReplicaHandle] = set()
        first: SimpleQueue[Exception | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._begin, args=(f"replica-{number}", first), daemon=True)
            for number in range(1, config.num_replicas + 1)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            error = first.get()
            if error is not None:
                self.close()
                raise error

    @property
    def members(self) -> list[Member]:
        """Those that can be chosen."""
        with self._lock:
            return list(self._members.values())

    @property
    def pool(self) -> ReplicaPool:
        """Where they come from."""
        return self._pool

    @property
    def draining(self) -> list[Member]:
        """Those that go on with what they have and take nothing new."""
        with self._lock:
            return list(self._draining)

    @property
    def busy(self) -> Mapping[str, int]:
        """Replicas by node."""
        return Counter(member.description.node for member in self.members)

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        """Processes that take the place of a replica that is lost."""
        return self._pool.spares

    @property
    def num_lost(self) -> int:
        """Replicas, and workers that replicas have replaced."""
        with self._lock:
            there = (*self._members.values(), *self._draining)
            return self._num_lost + sum(member.status.num_lost_workers for member in there)

    @property
    def num_moves(self) -> int:
        """Of replicas that were drained, and of layers between replicas' workers."""
        with self._lock:
            there = (*self._members.values(), *self._draining)
            return self._num_moves + sum(member.status.num_moves for member in there)

    def choose(self, request: RoutedRequest) -> Member | None:
        """Where a request goes; it counts as sent. None while there is no replica."""
        with self._lock:
            if not self._members:
                return None
            chosen = self._policy.choose(request, self._table)
            self._table.sent(chosen, request)
            return self._members[chosen]

    def ended(self, member: Member) -> None:
        """A request that went to a replica is over."""
        with self._lock:
            # Not on the account of the one that is in its place.
            if self._members.get(member.handle.id) is member:
                self._table.ended(member.handle.id)

    def replacement(self, replica_id: str) -> Member:
        """A replica that is ready to take the place of the one with this id. Goes to `replace` or to `dismiss`.

        Raises:
            WorkerLost: it cannot be started. What loading raises.
        """
        handle = self._start(replica_id)
        if handle is None:
            raise WorkerLost(f"{replica_id} is not needed any more")
        try:
            return self._load(handle)
        except BaseException:
            self._end(handle)
            raise

    def replace(self, old: Member, new: Member) -> bool:
        """Choose another replica from now on instead of one, which drains: what it was sent it goes on with until
        `dismiss`. False if that one has been lost meanwhile; nothing has changed then."""
        with self._lock:
            if self._closing.is_set() or self._members.get(old.handle.id) is not old:
                return False
            old.is_draining = True
            self._draining.append(old)
            self._num_moves += 1
            # Its cache is not the old one's.
            self._prefixes.forget(old.handle.id)
            self._residency.forget(old.handle.id)
            self._join(new)
            thread = threading.Thread(target=self._keep, args=(new,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return True

    def dismiss(self, member: Member) -> None:
        """End one that drains, or that has never been chosen."""
        with self._lock:
            self._settle(member)
        member.handle.retire(self._config.worker_timeout_seconds)
        self._end(member.handle)

    def close(self) -> None:
        """End all replicas, and the pool. May be called twice."""
        with self._lock:
            self._closing.set()
            handles, threads = list(self._handles), list(self._threads)
        for handle in handles:
            handle.kill()
        for thread in threads:
            thread.join()
        self._pool.close()

    def _begin(self, replica_id: str, first: SimpleQueue[Exception | None]) -> None:
        """A replica's thread. first: told how the start went."""
        try:
            member = self.replacement(replica_id)
        except Exception as error:
            first.put(EngineClosed(f"a replica was lost: {error}") if isinstance(error, WorkerLost) else error)
            return
        with self._lock:
            self._join(member)
        first.put(None)
        self._keep(member)

    def _keep(self, member: Member) -> None:
        """Listen to a replica; when it is lost, start another in its place. With the same id, the same adapters belong
        to that one."""
        latest: Member | None = member
        while latest is not None:
            self._listen(latest)
            if latest.is_draining:
                # `dismiss` ends it.
                return
            self._end(latest.handle)
            latest = self._again(latest.handle.id)

    def _again(self, replica_id: str) -> Member | None:
        """Another one that can be chosen, however often it takes; None once the set is closed."""
        wait, longest = RETRY_SECONDS
        while not self._closing.is_set():
            try:
                member = self.replacement(replica_id)
            except Exception as error:
                if not self._closing.is_set():
                    logger.warning("%s cannot be started: %s", replica_id, error)
                self._closing.wait(wait)
                wait = min(2 * wait, longest)
            else:
                with self._lock:
                    self._join(member)
                return member
        return None

    def _start(self, replica_id: str) -> ReplicaHandle | None:
        """A new process; None once the set is closed."""
        with self._lock:
            if self._closing.is_set():
                return None
            handle = self._pool.start(replica_id, self.busy)
            self._handles.add(handle)
            return handle

    def _end(self, handle: ReplicaHandle) -> None:
        handle.kill()
        with self._lock:
            self._handles.discard(handle)

    def _load(self, handle: ReplicaHandle) -> Member:
        description = handle.load(self._replica_config).result(LOAD_SECONDS)
        if self._replica_config.has_workers:
            for node in self._pool.vacated:
                # Its own workers are started by itself, anywhere. Nodes that are gone it does not know.
                with suppress(ObjectNotFound):
                    handle.drain(node).result(LOAD_SECONDS)
        status = handle.poll((), ()).result(self._config.worker_timeout_seconds).status
        if status is None:
            raise WorkerLost(f"{handle.id} does not say how it is")
        logger.info("%s is on %s, process %d", handle.id, description.node, description.pid)
        return Member(handle=handle, description=description, status=status)

    def _join(self, member: Member) -> None:
        """Have it chosen. With the lock."""
        self._members[member.handle.id] = member
        self._table.join(member.handle.id, member.status.report, max_num_seqs=self._config.max_num_seqs)
        self._homes.set_workers(list(self._members))
        if len(self._members) == self._config.num_replicas:
            # Not before: it would take the time of those that start.
            self._pool.keep_spares({other.description.node for other in self._members.values()})
        self._tell(Joined(member=member))

    def _listen(self, member: Member) -> None:
        """Until it is lost, or the set is closed."""
        forget: Sequence[str] = ()
        prepare: Sequence[AdapterRecipe] = self._to_prepare(member)
        while not self._closing.is_set():
            try:
                news = member.handle.poll(forget, prepare).result(self._config.worker_timeout_seconds)
            except Exception as error:
                # Also what nobody foresaw: it has lost its engine, or its mind.
                self._lose(member, error)
                return
            forget, prepare = (), ()
            if news.status is not None:
                self._note(member, news.status)
                forget = self._to_forget(news.status)
                prepare = () if member.is_draining else self._to_prepare(member)
            for event in news.events:
                self._tell(Said(member=member, event=event))

    def _note(self, member: Member, status: ReplicaStatus) -> None:
        with self._lock:
            member.status = status
            if member.is_draining:
                return
            self._table.report(member.handle.id, status.report)
        self._residency.note(member.handle.id, status.report.adapters, status.load.adapter_bytes)

    def _lose(self, member: Member, error: Exception) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            if member.is_draining:
                # One that was dismissed is not lost.
                if self._settle(member):
                    self._num_lost += 1
                    self._tell(Lost(member=member))
                return
            del self._members[member.handle.id]
            self._table.leave(member.handle.id)
            self._homes.set_workers(list(self._members))
            self._prefixes.forget(member.handle.id)
            self._num_lost += 1 + member.status.num_lost_workers
            self._num_moves += member.status.num_moves
        logger.warning("%s is lost: %s", member.handle.id, error)
        self._residency.forget(member.handle.id)
        self._tell(Lost(member=member))

    def _settle(self, member: Member) -> bool:
        """Note that one that drains is gone, once. With the lock."""
        if member not in self._draining:
            return False
        self._draining.remove(member)
        self._num_lost += member.status.num_lost_workers
        self._num_moves += member.status.num_moves
        return True

    def _to_forget(self, status: ReplicaStatus) -> list[str]:
        """Digests that a replica knows and nobody needs."""
        digests = [digest for digest in status.known if not self._registry.num_users(digest)]
        with self._lock:
            for digest in digests:
                self._homes.forget(digest)
        return digests

    def _to_prepare(self, member: Member) -> list[AdapterRecipe]:
        """Adapters that belong on a replica and are not known there."""
        known = member.status.known | member.prepared
        adapters = [adapter for adapter in self._registry.adapters.values() if adapter.digest not in known]
        now = time.monotonic()
        with self._lock:
            missing = [adapter for adapter in adapters if member.handle.id in self._homes.homes(adapter.digest, now)]
        chosen = missing[:MAX_PREPARED]
        member.prepared.update(adapter.digest for adapter in chosen)
        return [AdapterRecipe.of(adapter) for adapter in chosen]
