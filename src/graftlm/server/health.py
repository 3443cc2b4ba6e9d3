"""GET /health and /ready: what an orchestrator asks."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import EngineClosed

# A step that takes longer is not one of a server that keeps up.
READY_WITHIN_SECONDS = 10.0


def health_routes(llm: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Alive: the engine's thread runs. It does while a server drains."""
        if not llm.is_alive:
            raise EngineClosed("the engine is not running", do="restart the server")
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Worth sending requests to: the engine takes them, and gets through its steps, or has a replica that does."""
        if not llm.is_running:
            raise EngineClosed("the engine takes no more requests", do="ask another server")
        if llm.config.replicas and not any(worker.state == "running" for worker in llm.workers):
            raise EngineClosed("all replicas were lost, and others are being started", do="try again soon")
        if not await llm.responds(within_seconds=READY_WITHIN_SECONDS):
            raise EngineClosed(
                "the engine is stuck in a step", got=f"no answer in {READY_WITHIN_SECONDS:g} seconds", do="try later"
            )
        return JSONResponse({"status": "ready"})

    return router
