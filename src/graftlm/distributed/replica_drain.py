"""What leaves when a replica, one of its workers or a node is drained, and what comes in its place. Knows no jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from graftlm.distributed.drain import chosen_node, least_busy
from graftlm.distributed.replica_group import LOAD_SECONDS, Member, ReplicaGroup
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.executor import MovedStage
from graftlm.errors import DrainFailed, ObjectNotFound


class ReplicaDrain:
    """Drains on a group, one at a time.

    Args:
        num_layers: of the model. has_workers: whether replicas do, each with a pool of its own.
    """

    def __init__(self, group: ReplicaGroup, *, num_layers: int, has_workers: bool) -> None:
        self._group = group
        self._num_layers = num_layers
        self._has_workers = has_workers

    @contextmanager
    def replacing(self, target: str) -> Iterator[tuple[list[Member], tuple[MovedStage, ...]]]:
        """Replicas that are chosen no more, because others have their places, until they are ended at the end of this;
        and what has gone where.

        Args:
            target: a replica's id, that of one of its workers ("replica-1/worker-2"), or a node's.

        Raises:
            ObjectNotFound: nothing is called so.
            DrainFailed: there is nowhere to go, or what is there fails. What workers of replicas had moved by then
                stays there, everything else as it was.
        """
        members = self._group.members
        by_id = {member.handle.id: member for member in members}
        replica_id, _, worker = target.partition("/")
        if target in by_id:
            yield from self._replaced([by_id[target]], ())
        elif replica_id in by_id and worker in _workers(by_id[replica_id]):
            yield [], self._without(by_id[replica_id], worker)
        else:
            yield from self._without_node(target, members)

    def _without_node(
        self, target: str, members: Sequence[Member]
    ) -> Iterator[tuple[list[Member], tuple[MovedStage, ...]]]:
        pool = self._group.pool
        nodes = {member.description.node for member in members}.union(
            pool.nodes, *({worker.node for worker in member.status.workers} for member in members)
        )
        workers = [f"{member.handle.id}/{worker}" for member in members for worker in _workers(member)]
        node = chosen_node(target, nodes, workers=[*(member.handle.id for member in members), *workers])
        if not set(pool.nodes) - {node}:
            raise DrainFailed(
                "there is no other node that could take what is there", do="let one join the cluster first"
            )
        pool.vacate(node)
        try:
            moved: list[MovedStage] = []
            if self._has_workers:
                for member in members:
                    if member.description.node != node:
                        # Also where nothing of it is there: it is not to start anything there either.
                        with suppress(ObjectNotFound):
                            moved += self._without(member, node)
            there = [member for member in members if member.description.node == node]
            yield from self._replaced(there, tuple(moved))
        except BaseException:
            pool.readmit(node)
            raise

    def _without(self, member: Member, target: str) -> tuple[MovedStage, ...]:
        """What has left one of a replica's workers, or a node, within the replica."""
        replica_id = member.handle.id
        try:
            moved = member.handle.drain(target).result(LOAD_SECONDS)
        except WorkerLost as lost:
            raise DrainFailed("the replica was lost meanwhile", got=lost) from lost
        return tuple(
            replace(each, worker=f"{replica_id}/{each.worker}", to=f"{replica_id}/{each.to}") for each in moved
        )

    def _replaced(
        self, old: Sequence[Member], moved: tuple[MovedStage, ...]
    ) -> Iterator[tuple[list[Member], tuple[MovedStage, ...]]]:
        pairs = list(zip(old, self._replacements(old), strict=True))
        replaced: list[tuple[Member, Member]] = []
        for before, after in pairs:
            if self._group.replace(before, after):
                replaced.append((before, after))
            else:
                # Another process has its place already.
                self._group.dismiss(after)
        try:
            yield [before for before, _ in replaced], (*moved, *(self._moved(after) for _, after in replaced))
        finally:
            for before, _ in replaced:
                self._group.dismiss(before)

    def _replacements(self, old: Sequence[Member]) -> list[Member]:
        """Replicas that can take their places, started together."""
        if not old:
            return []
        self._group.pool.keep_spares(least_busy(self._group.pool.nodes, self._group.busy, len(old)))
        with ThreadPoolExecutor(len(old)) as threads:
            starts = [threads.submit(self._group.replacement, member.handle.id) for member in old]
        failures = [error for start in starts if (error := start.exception()) is not None]
        if not failures:
            return [start.result() for start in starts]
        for start in starts:
            if start.exception() is None:
                self._group.dismiss(start.result())
        raise DrainFailed("what was to take its place cannot be started", got=failures[0]) from failures[0]

    def _moved(self, member: Member) -> MovedStage:
        return MovedStage(
            layers=(0, self._num_layers),
            worker=member.handle.id,
            to=member.handle.id,
            node=member.description.node,
            pid=member.description.pid,
        )


def _workers(member: Member) -> list[str]:
    return [worker.id for worker in member.status.workers if worker.state == "running"]
