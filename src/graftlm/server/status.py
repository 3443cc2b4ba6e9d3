"""GET /status: what goes on in the server now, and what the caller may do about it."""

from __future__ import annotations

import time
from typing import Literal, TypedDict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.executor import WorkerInfo, WorkerState
from graftlm.engine.request_stream import RequestStream
from graftlm.server.adapters import NOT_ENABLED, AdapterSources
from graftlm.server.callers import NOT_ADMIN, caller_of

# The oldest ones are shown; how many there are is counted in full.
MAX_REQUESTS = 50


class RequestStatus(TypedDict):
    """seconds: since it arrived."""

    id: str
    model: str
    state: Literal["waiting", "running"]
    prompt_tokens: int
    output_tokens: int
    seconds: float


class WorkStatus(TypedDict):
    """As `WorkerWork`."""

    num_steps: int
    num_replayed_tokens: int
    compute_seconds: float
    idle_seconds: float
    hop_bytes: int
    adapter_bytes: int


class LoadStatus(TypedDict):
    """As `WorkerLoad`."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float


class WorkerStatus(TypedDict):
    """layers: from the first to before the second; null for a spare, and for a replica with workers of its own.
    rank: null where no others share them.
    work: of the first rank; null for the others and for spares. load: of a replica; null for all others.
    replica: the id of the one that it works for, or is; null where there are none."""

    id: str
    node: str
    pid: int
    layers: tuple[int, int] | None
    rank: int | None
    adapters: tuple[str, ...]
    state: WorkerState
    work: WorkStatus | None
    load: LoadStatus | None
    replica: str | None


class EngineStatus(TypedDict):
    """num_running, num_waiting: answers. requests: the oldest unfinished ones. kv_cache_usage: from 0 to 1.
    workers: none when the engine computes in the server's process. num_lost_workers: that were replaced so far.
    num_moves: times that a worker's layers went to another, or became others, though none was lost."""

    num_running: int
    num_waiting: int
    requests: list[RequestStatus]
    kv_cache_usage: float
    adapter_bytes: int
    max_adapter_bytes: int
    workers: list[WorkerStatus]
    num_lost_workers: int
    num_moves: int


class ServerStatus(TypedDict):
    """loading_refused: why the caller cannot load or unload adapters; null if they can.
    engine: null for callers who may not read metrics, because it names every model."""

    loading_refused: str | None
    engine: EngineStatus | None


def status_routes(llm: AsyncLLM, sources: AdapterSources | None) -> APIRouter:
    """Args: sources: what clients may load adapters from; None if they may not."""
    router = APIRouter()

    @router.get("/status")
    async def status(request: Request) -> Response:
        caller = caller_of(request)
        refused = NOT_ADMIN if not caller.is_admin else NOT_ENABLED if sources is None else None
        body: ServerStatus = {
            "loading_refused": refused,
            "engine": _engine_status(llm) if caller.reads_metrics else None,
        }
        return JSONResponse(body, headers={"cache-control": "no-store"})

    return router


def _engine_status(llm: AsyncLLM) -> EngineStatus:
    state = llm.state
    oldest = sorted(llm.requests, key=lambda stream: stream.timings.arrived)[:MAX_REQUESTS]
    return {
        "num_running": state.num_running,
        "num_waiting": state.num_waiting,
        "requests": [_request_status(stream, llm.model_name) for stream in oldest],
        "kv_cache_usage": 1 - state.num_free_blocks / state.num_blocks,
        "adapter_bytes": state.adapter_bytes,
        "max_adapter_bytes": llm.config.adapter_memory_bytes,
        "workers": [_worker_status(worker) for worker in llm.workers],
        "num_lost_workers": llm.num_lost_workers,
        "num_moves": llm.num_moves,
    }


def _worker_status(worker: WorkerInfo) -> WorkerStatus:
    work, load = worker.work, worker.load
    return {
        "id": worker.id,
        "node": worker.node,
        "pid": worker.pid,
        "layers": worker.layers,
        "rank": worker.rank,
        "adapters": worker.adapters,
        "state": worker.state,
        "work": None
        if work is None
        else {
            "num_steps": work.num_steps,
            "num_replayed_tokens": work.num_replayed_tokens,
            "compute_seconds": work.compute_seconds,
            "idle_seconds": work.idle_seconds,
            "hop_bytes": work.hop_bytes,
            "adapter_bytes": work.adapter_bytes,
        },
        "load": None
        if load is None
        else {
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "kv_cache_usage": load.kv_cache_usage,
        },
        "replica": worker.replica,
    }


def _request_status(stream: RequestStream, base: str) -> RequestStatus:
    return {
        "id": stream.request_id,
        "model": stream.adapter or base,
        "state": "waiting" if stream.timings.begun is None else "running",
        "prompt_tokens": len(stream.prompt_token_ids),
        "output_tokens": stream.num_output_tokens,
        "seconds": round(time.perf_counter() - stream.timings.arrived, 3),
    }
