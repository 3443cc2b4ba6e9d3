"""Which stages a drain concerns, and where they can go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graftlm.distributed.messages import StageDescription, StagePlan
from graftlm.distributed.worker import Worker
from graftlm.engine.executor import MovedStage
from graftlm.errors import ObjectNotFound

# Fewer letters of a node's id are taken for a mistake.
SHORTEST_NODE = 6


@dataclass(frozen=True, kw_only=True)
class DrainChoice:
    """stages: their numbers. node: which is drained, if a whole one is."""

    stages: tuple[int, ...]
    node: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Replacement:
    """A worker that has loaded a stage which another still has."""

    index: int
    old: Worker
    new: Worker
    plan: StagePlan
    description: StageDescription

    @property
    def moved(self) -> MovedStage:
        return MovedStage(
            layers=(self.plan.span.start, self.plan.span.stop),
            worker=self.old.id,
            to=self.new.id,
            node=self.description.node,
            pid=self.description.pid,
        )


def chosen_stages(target: str, places: Mapping[int, tuple[str, StageDescription]], nodes: Iterable[str]) -> DrainChoice:
    """What a worker's id means, or one of its ranks', or a node's, which may be cut short.

    Args:
        places: of each stage, by number: its worker's id, and where it is. nodes: where there could be others.

    Raises:
        ObjectNotFound
    """
    nodes_of: dict[int, set[str]] = {}
    for index, (worker, description) in places.items():
        if target in {worker, *(f"{worker}.{rank}" for rank in range(1, len(description.others) + 1))}:
            return DrainChoice(stages=(index,), node=None)
        nodes_of[index] = {place.node for place in (description, *description.others)}
    node = chosen_node(target, set(nodes).union(*nodes_of.values()), workers=[worker for worker, _ in places.values()])
    return DrainChoice(stages=tuple(index for index, there in nodes_of.items() if node in there), node=node)


def chosen_node(target: str, nodes: Iterable[str], *, workers: Sequence[str]) -> str:
    """The node that a target which is no worker means.

    Args:
        workers: what else it could have been.

    Raises:
        ObjectNotFound
    """
    known = sorted(nodes)
    matches = [node for node in known if node == target or (len(target) >= SHORTEST_NODE and node.startswith(target))]
    if len(matches) != 1:
        raise ObjectNotFound(
            "several nodes' ids begin so" if matches else "no worker and no node has this id",
            got=target,
            allowed=", ".join((*sorted(workers), *known)),
        )
    return matches[0]


def least_busy(nodes: Sequence[str], busy: Mapping[str, int], count: int) -> list[str]:
    """Where so many more stages go, one after the other to the node with the fewest; none if there are no nodes.

    Args:
        busy: node -> stages that are there.
    """
    load = {node: busy.get(node, 0) for node in nodes}
    chosen: list[str] = []
    for _ in range(count if load else 0):
        node = min(load, key=load.__getitem__)
        load[node] += 1
        chosen.append(node)
    return chosen
