"""How replicas, and the workers of each, look from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from graftlm.distributed.replica_group import Member
from graftlm.engine.executor import WorkerInfo, WorkerLoad


def describe_replicas(
    members: Iterable[Member],
    *,
    layers: tuple[int, int] | None,
    names: Sequence[tuple[str, str]],
    held: Mapping[str, Set[str]],
) -> Iterator[WorkerInfo]:
    """Each replica, and after it its workers, under ids that begin with its own.

    Args:
        layers: of each replica; None if they have workers for them. names: of adapters, with their digests.
        held: replica's id -> digests in its memory.
    """
    for member in members:
        replica_id, status = member.handle.id, member.status
        yield WorkerInfo(
            id=replica_id,
            node=member.description.node,
            pid=member.description.pid,
            layers=layers,
            # What is told by this id is of the one in its place.
            adapters=() if member.is_draining else _known(names, held.get(replica_id, frozenset())),
            state="draining" if member.is_draining else "running",
            # Steps are computed once, and counted where they are.
            work=status.work if layers is not None else None,
            load=WorkerLoad(
                num_running=status.load.num_running,
                num_waiting=status.load.num_waiting,
                kv_cache_usage=1 - status.load.num_free_blocks / status.load.num_blocks,
            ),
            replica=replica_id,
        )
        for worker in status.workers:
            yield replace(
                worker,
                id=f"{replica_id}/{worker.id}",
                adapters=_known(names, frozenset(worker.adapters)),
                state="draining" if member.is_draining else worker.state,
                replica=replica_id,
            )


def _known(names: Sequence[tuple[str, str]], digests: Set[str]) -> tuple[str, ...]:
    """The names of adapters, in the order of `names`; weighted sums have none."""
    return tuple(name for name, digest in names if digest in digests)
