"""Routes of OpenAI's that are refused by name: a client learns why, not only that nothing is there."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from graftlm.server.errors import ErrorReply

_WHY = {
    "/v1/embeddings": "this server generates text; do: ask a server of an embedding model",
    "/v1/moderations": "this server generates text; do: ask a model to judge by /v1/chat/completions",
    "/v1/batches": "batches are run on the command line; do: graft generate MODEL -f FILE -o FILE",
}


def not_offered_routes() -> APIRouter:
    """Every one answers 404, whatever it is sent."""
    router = APIRouter()

    async def refuse(request: Request) -> Response:
        path = request.url.path
        message = f"{path} is not offered: {_WHY[path]}"
        return ErrorReply(status=404, message=message, code="route_not_found").response()

    for path in _WHY:
        router.add_api_route(path, refuse, methods=["GET", "POST"], include_in_schema=False)
    return router
