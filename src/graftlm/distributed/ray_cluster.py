"""A Ray cluster that is there, or one started here, and processes on it.

An actor is never restarted by Ray: it would come back empty and say nothing. Ray 2.60 sees an actor that was killed
within 15 ms and one that is frozen never, so whoever waits for an answer has a deadline, or listens to a heart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set
from typing import Any, Generic, TypeVar

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from graftlm.distributed.heartbeat import Pulse
from graftlm.distributed.messages import StageDescription
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.memory import available_bytes
from graftlm.errors import ConfigurationError
from graftlm.layers.collective import CollectiveFailed

Answer = TypeVar("Answer")
LOOPBACK = "127.0.0.1"
# Ray's own, on every node.
NODE_LABEL = "ray.io/node-id"
# Of a cluster that is started here; what travels is hidden states, logits and tokens, one step at a time.
OBJECT_STORE_BYTES = 256 << 20


class RayCluster:
    """The cluster that this process is connected to already, or the one at `address`, or one that is started here and
    ends with this object.

    Args:
        num_processes, cpus_each: that will be wanted of it.

    Raises:
        ConfigurationError: there is no cluster at `address`, or it is too small.
    """

    def __init__(self, address: str | None, *, num_processes: int, cpus_each: int) -> None:
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(address, num_cpus=num_processes * cpus_each)
        _check_size(num_processes, cpus_each)

    def nodes(self, *, min_cpus: int) -> list[str]:
        """Those that are alive and have so many cores."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [node["NodeID"] for node in alive if node["Resources"].get("CPU", 0) >= min_cpus]

    def close(self) -> None:
        """End what was started here. May be called twice."""
        if self._is_ours:
            ray.shutdown()


class RayCall(Generic[Answer]):
    """`Call` of an actor's method. pulse: of its process; without one it has to answer in time."""

    def __init__(self, process_id: str, reference: Any, pulse: Pulse | None) -> None:
        self._process_id = process_id
        self._reference = reference
        self._pulse = pulse

    @property
    def promise(self) -> Any:
        return self._reference

    @property
    def is_done(self) -> bool:
        return self._is_answered(0.0)

    def wait(self, patience_seconds: float) -> None:
        interval = patience_seconds if self._pulse is None else self._pulse.interval_seconds
        while not self._is_answered(interval):
            if self._pulse is None:
                raise WorkerLost(f"{self._process_id} has not answered for {patience_seconds:g} s")
            if self._pulse.look() >= patience_seconds:
                raise WorkerLost(f"{self._process_id} has given no sign of life for {patience_seconds:g} s")
        if self._pulse is not None:
            self._pulse.heard()

    def result(self, patience_seconds: float) -> Answer:
        self.wait(patience_seconds)
        try:
            answer: Answer = ray.get(self._reference, timeout=patience_seconds)
        except RayTaskError as error:
            if isinstance(error.cause, CollectiveFailed):
                raise WorkerLost(f"{self._process_id}: {error.cause}") from error
            raise error.cause from error
        except GetTimeoutError as error:
            raise WorkerLost(f"the answer of {self._process_id} cannot be had") from error
        except RayError as error:
            raise WorkerLost(f"{self._process_id} is dead ({type(error).__name__})") from error
        return answer

    def _is_answered(self, timeout_seconds: float) -> bool:
        return bool(ray.wait([self._reference], timeout=timeout_seconds, fetch_local=False)[0])


class RayProcess:
    """A process on the cluster.

    Args:
        actor: has a method `describe` that answers as soon as it has started. pulse: its own, if it has one.
        node: the Ray node it was asked to be on, if any.
    """

    def __init__(self, process_id: str, actor: Any, *, pulse: Pulse | None = None, node: str | None = None) -> None:
        self.id = process_id
        self.node = node
        self._actor = actor
        self._pulse = pulse
        self._where: RayCall[StageDescription] = RayCall(process_id, actor.describe.remote(), pulse)
        self._description: StageDescription | None = None
        # Knows when it began, so that another process with its number is never taken for it.
        self._process: psutil.Process | None = None

    @property
    def description(self) -> StageDescription | None:
        """Where it is; None while it starts, or if it is dead."""
        if self._description is None and self._where.is_done:
            with contextlib.suppress(WorkerLost, psutil.NoSuchProcess):
                description = self._where.result(1.0)
                if description.node == ray.get_runtime_context().get_node_id():
                    self._process = psutil.Process(description.pid)
                self._description = description
        return self._description

    def retire(self, patience_seconds: float) -> None:
        """Have it end by itself, with exit code 0; kill it if it does not in time.

        Its actor has a method `leave` that ends it.
        """
        try:
            ray.get(self._actor.leave.remote(), timeout=patience_seconds)
        except GetTimeoutError:
            self.kill()
        except RayError:
            # That it is gone is all the answer there is.
            pass

    def kill(self) -> None:
        """End it, however it is. May be called twice.

        A process on this machine is killed by the system too: Ray asks it to go, which a frozen one does not hear.
        """
        if self.description is not None and self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)

    def _call(self, method: str, *arguments: Any) -> RayCall[Any]:
        return RayCall(self.id, getattr(self._actor, method).remote(*arguments), self._pulse)


def describe_here() -> StageDescription:
    """Where the actor is in which this is called."""
    return StageDescription(
        node=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        free_bytes=available_bytes(torch.device("cpu")),
    )


def actor_options(num_cpus: int, node: str | None, *, avoid: Set[str] = frozenset()) -> dict[str, Any]:
    """Options of an actor that is never restarted.

    Args:
        node: of a spare, which reserves no cores: while it waits it uses none. Any other goes where there is room.
        avoid: nodes on which it may not be.
    """
    options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
    if node is None:
        if avoid:
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoid))})"}
        return options | {"num_cpus": num_cpus, "scheduling_strategy": "SPREAD"}
    # Ray 2.60 takes a soft one for no more than a hint: actors were elsewhere though the node had room.
    return options | {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _connect(address: str | None, *, num_cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What is let go of may fail: it went to a worker that was given up.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as cause:
        raise ConfigurationError(
            "Ray cannot be reached", got=address or "a new local cluster", do=str(cause)[:200]
        ) from cause


def _check_size(num_processes: int, cpus_each: int) -> None:
    """Ray would wait for more cores to join."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    room = sum(num_cpus // cpus_each for num_cpus in nodes)
    if room < num_processes:
        raise ConfigurationError(
            "the Ray cluster has too few cores for the workers",
            got=f"{num_processes} workers of {cpus_each} cores",
            allowed=f"{room} of them on {sum(nodes)} cores of {len(nodes)} nodes",
            do="lower workers, replicas, tensor_parallel or worker_cpus",
        )
