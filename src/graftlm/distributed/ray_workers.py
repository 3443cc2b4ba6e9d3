"""Workers that are Ray actors. The only module that knows Ray.

An actor is never restarted by Ray: it would come back with an empty cache and say nothing. Its death is an error here,
and the pipeline replaces it. Ray 2.60 sees an actor that was killed within 15 ms and one that is frozen never, so every
wait has a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftlm.config import EngineConfig
from graftlm.distributed.gloo_collective import GlooCollective
from graftlm.distributed.messages import AdapterRecipe, StageDescription, StagePlan, StageReply, StageStep
from graftlm.distributed.stage import Stage
from graftlm.distributed.worker import WorkerLost
from graftlm.engine.executor import WorkerInfo
from graftlm.errors import ConfigurationError
from graftlm.layers.collective import CollectiveFailed

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
LOOPBACK = "127.0.0.1"
# Of a cluster that is started here; what travels is hidden states and logits, one step at a time.
OBJECT_STORE_BYTES = 256 << 20


class StageProcess:
    """What runs in an actor: a process that has imported everything, and holds a stage once it was told which."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._stage: Stage | None = None

    def describe(self) -> StageDescription:
        return StageDescription(node=ray.get_runtime_context().get_node_id(), pid=os.getpid())

    def load(self, plan: StagePlan) -> StageDescription:
        collective = None
        if plan.place is not None:
            collective = GlooCollective(
                plan.place,
                address=ray.util.get_node_ip_address(),
                timeout_seconds=plan.config.worker_timeout_seconds,
            )
        self._stage = Stage(plan, collective)
        return self.describe()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the stage."""
        return getattr(self._stage, method)(*arguments)


class RayCall(Generic[Answer]):
    def __init__(self, worker_id: str, reference: Any) -> None:
        self._worker_id = worker_id
        self._reference = reference

    def result(self, timeout_seconds: float) -> Answer:
        if self._reference is None:
            raise WorkerLost(f"{self._worker_id} answered something else")
        reference, self._reference = self._reference, None
        try:
            answer: Answer = ray.get(reference, timeout=max(timeout_seconds, 0.0))
        except RayTaskError as error:
            if isinstance(error.cause, CollectiveFailed):
                raise WorkerLost(f"{self._worker_id}: {error.cause}") from error
            raise error.cause from error
        except GetTimeoutError as error:
            raise WorkerLost(f"{self._worker_id} has not answered for {timeout_seconds:.0f} s") from error
        except RayError as error:
            raise WorkerLost(f"{self._worker_id} is dead ({type(error).__name__})") from error
        return answer

    @property
    def is_done(self) -> bool:
        return self._reference is None or bool(ray.wait([self._reference], timeout=0)[0])


class RayWorker:
    """`Worker` in an actor. node: the Ray node it was asked to be on, if any."""

    def __init__(self, worker_id: str, actor: Any, node: str | None) -> None:
        self.id = worker_id
        self.node = node
        self._actor = actor
        self._where: RayCall[StageDescription] = RayCall(worker_id, actor.describe.remote())
        self._description: StageDescription | None = None
        # Knows when it began, so that another process with its number is never taken for it.
        self._process: psutil.Process | None = None

    def load(self, plan: StagePlan) -> RayCall[StageDescription]:
        return RayCall(self.id, self._actor.load.remote(plan))

    def begin(self, epoch: int) -> RayCall[None]:
        return self._ask("begin", epoch)

    def ensure_adapter(self, recipe: AdapterRecipe) -> RayCall[bool]:
        return self._ask("ensure_adapter", recipe)

    def forget_adapters(self, digests: Sequence[str]) -> RayCall[None]:
        return self._ask("forget_adapters", tuple(digests))

    def step(self, step: StageStep) -> RayCall[StageReply]:
        return self._ask("step", step)

    def kill(self) -> None:
        """A worker on this machine is killed by the system too: Ray asks a process to go, which a frozen one does not
        hear."""
        if self.description is not None and self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)

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

    def _ask(self, method: str, *arguments: Any) -> RayCall[Any]:
        return RayCall(self.id, self._actor.ask.remote(method, *arguments))


class RayPool:
    """`WorkerPool` on the cluster of a config. One that it starts itself ends with the pool; one that this process is
    connected to already is used, and left as it is.

    Raises:
        ConfigurationError: there is no cluster at `ray_address`, or it is too small.
    """

    def __init__(self, config: EngineConfig) -> None:
        num_workers = config.num_stages * config.tensor_parallel
        self._num_threads = config.worker_cpus or max(1, torch.get_num_threads() // num_workers)
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            _connect(config.ray_address, num_cpus=num_workers * self._num_threads)
        _check_size(num_workers, self._num_threads)
        self._spares: list[RayWorker] = []
        self._stores: list[TCPStore] = []
        self._num_spawned = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def rendezvous(self, size: int) -> str:
        """A store in this process, at the address by which the cluster knows this machine and no other."""
        listening = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = listening.getsockname()[:2]
        # The store closes it.
        self._stores.append(
            TCPStore(host, port, size, True, wait_for_workers=False, master_listen_fd=listening.detach())
        )
        return f"{host}:{port}"

    @property
    def spares(self) -> tuple[WorkerInfo, ...]:
        with self._lock:
            spares = [(spare, spare.description) for spare in self._spares]
        return tuple(
            WorkerInfo(id=spare.id, node=where.node, pid=where.pid, layers=None, adapters=(), state="spare")
            for spare, where in spares
            if where is not None
        )

    def take(self) -> RayWorker:
        with self._lock:
            return self._spares.pop(0) if self._spares else self._spawn(None)

    def keep_spares(self, nodes: Iterable[str]) -> None:
        with self._lock:
            missing = Counter(nodes) - Counter(spare.node for spare in self._spares if spare.node is not None)
            self._spares.extend(self._spawn(node) for node in sorted(missing.elements()))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for spare in self._spares:
                spare.kill()
            self._spares.clear()
            self._stores.clear()
        if self._owns_connection:
            ray.shutdown()

    def _spawn(self, node: str | None) -> RayWorker:
        """A spare reserves no cores: while it waits it uses none."""
        options: dict[str, Any] = {"num_cpus": self._num_threads, "scheduling_strategy": "SPREAD"}
        if node is not None:
            options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        self._num_spawned += 1
        actor_class = ray.remote(StageProcess).options(max_restarts=0, max_task_retries=0, **options)
        return RayWorker(f"worker-{self._num_spawned}", actor_class.remote(self._num_threads), node)


def _connect(address: str | None, *, num_cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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


def _check_size(num_workers: int, worker_cpus: int) -> None:
    """Ray would wait for more cores to join."""
    num_cpus = int(ray.cluster_resources().get("CPU", 0))
    if num_cpus < num_workers * worker_cpus:
        raise ConfigurationError(
            "the Ray cluster has too few cores for the workers",
            got=f"{num_workers} workers of {worker_cpus} cores",
            allowed=f"{num_cpus} cores",
            do="lower workers or worker_cpus",
        )
