"""POST /v1/drain_worker: layers leave a worker, a replica or a node while the server runs."""

from __future__ import annotations

from typing import TypedDict

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.executor import MovedStage
from graftlm.server.callers import require_operator
from graftlm.server.json_body import JsonRoute
from graftlm.server.schemas import DrainWorkerRequest


class MovedStatus(TypedDict):
    """As `MovedStage`. layers: from the first to before the second."""

    layers: tuple[int, int]
    worker: str
    to: str
    node: str
    pid: int


def worker_routes(llm: AsyncLLM) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(require_operator)])

    @router.post("/v1/drain_worker")
    async def drain_worker(body: DrainWorkerRequest) -> Response:
        moved = await llm.drain(body.worker)
        return JSONResponse({"object": "drain", "moved": [_moved_status(stage) for stage in moved]})

    return router


def _moved_status(stage: MovedStage) -> MovedStatus:
    return {
        "layers": stage.layers,
        "worker": stage.worker,
        "to": stage.to,
        "node": stage.node,
        "pid": stage.pid,
    }
