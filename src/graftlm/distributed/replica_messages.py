"""What a replica set and its replicas tell each other. Plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.distributed.messages import AdapterRecipe
from graftlm.engine.executor import WorkerInfo, WorkerWork
from graftlm.engine.outputs import CompletionOutput, TokenLogprob
from graftlm.engine.request import Resumption
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.tenant import Tenant
from graftlm.errors import GraftError
from graftlm.routing.worker_table import WorkerReport


@dataclass(frozen=True, kw_only=True)
class ReplicaRequest:
    """A job for a replica.

    params: with a seed, so that every replica draws the same tokens. adapter: None for the base.
    resume: the answers that are not finished, and what they have so far.
    """

    job_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterRecipe | None
    tenant: Tenant
    resume: Resumption


@dataclass(frozen=True, kw_only=True)
class ReplicaDelta:
    """What is new of a job's answers. computing_seconds: since the job was first in a step."""

    job_id: str
    answers: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    computing_seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplicaFailure:
    """A job that a replica cannot go on with. is_fatal: it takes no others either."""

    job_id: str
    error: GraftError
    is_fatal: bool


ReplicaEvent = ReplicaDelta | ReplicaFailure


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """How full a replica is. num_running, num_waiting: answers. num_free_blocks, num_blocks: of the KV cache."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    adapter_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """How a replica is.

    report: for routing. known: digests of the adapters that it has read, whether their weights are in memory or not.
    workers: its own, if it has any; their adapters have digests for names. num_lost_workers: that were replaced.
    num_moves: of their layers.
    """

    report: WorkerReport
    load: ReplicaLoad
    work: WorkerWork
    known: frozenset[str]
    workers: tuple[WorkerInfo, ...]
    num_lost_workers: int
    num_moves: int


@dataclass(frozen=True, kw_only=True)
class ReplicaNews:
    """What happened in a replica since it was asked last, and every now and then how it is."""

    events: tuple[ReplicaEvent, ...]
    status: ReplicaStatus | None
