"""GET /v1/models: the base and every adapter, which are the names that answer."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from graftlm.adapters import Adapter
from graftlm.engine.async_llm import AsyncLLM
from graftlm.server.replies import ModelCard


def model_routes(llm: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        cards = [_base_card(llm), *(_adapter_card(llm, adapter) for adapter in llm.adapters.values())]
        return JSONResponse({"object": "list", "data": cards})

    # Names may hold slashes.
    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        name = llm.resolve_model(model)
        return JSONResponse(_base_card(llm) if name is None else _adapter_card(llm, llm.adapters[name]))

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


def _adapter_card(llm: AsyncLLM, adapter: Adapter) -> ModelCard:
    return {**_base_card(llm), "id": adapter.name, "created": adapter.created, "parent": llm.model_name}
