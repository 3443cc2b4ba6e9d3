"""GET /v1/models: the base and every adapter, which are the names that answer, as far as the caller may use them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.adapters import Adapter
from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.residency import ResidencyState
from graftlm.server.callers import caller_of, resolve_model
from graftlm.server.replies import AdapterCard, ModelCard


def model_routes(llm: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        may_use = caller_of(request).may_use
        # A folder of adapters is looked through.
        residency = await asyncio.to_thread(lambda: llm.residency)
        known = llm.adapters
        base = [_base_card(llm)] if may_use(llm.model_name) else []
        cards = [_adapter_card(llm, name, known.get(name), state) for name, state in residency.items() if may_use(name)]
        return JSONResponse({"object": "list", "data": [*base, *cards]})

    # Names may hold slashes.
    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> Response:
        name = resolve_model(request, llm, model)
        if name is None:
            return JSONResponse(_base_card(llm))
        residency = await asyncio.to_thread(lambda: llm.residency)
        # A weighted sum is not listed, but answers.
        return JSONResponse(_adapter_card(llm, name, llm.adapters.get(name), residency.get(name, "absent")))

    return router


def _base_card(llm: AsyncLLM) -> ModelCard:
    return {
        "id": llm.model_name,
        "object": "model",
        "created": llm.created,
        "owned_by": "graft",
        "root": llm.model_name,
        "parent": None,
        "max_model_len": llm.max_model_len,
    }


def _adapter_card(llm: AsyncLLM, name: str, adapter: Adapter | None, state: ResidencyState) -> AdapterCard:
    """Args: adapter: None if it has not been read yet, or is a sum."""
    created = llm.created if adapter is None else adapter.created
    return {
        **_base_card(llm),
        "id": name,
        "created": created,
        "parent": llm.model_name,
        "residency": state,
        "method": None if adapter is None else adapter.method,
        "ranks": None if adapter is None else list(adapter.ranks),
        "num_bytes": None if adapter is None else adapter.num_bytes,
        "digest": None if adapter is None else adapter.digest,
    }
