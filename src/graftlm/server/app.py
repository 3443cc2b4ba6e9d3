"""The application: every route, the size limit and the error shape, put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import EngineClosed
from graftlm.server.adapters import adapter_routes, permitted_roots
from graftlm.server.body_limit import BodyLimit
from graftlm.server.chat import chat_routes
from graftlm.server.completions import completion_routes
from graftlm.server.errors import install_error_handlers
from graftlm.server.models import model_routes

MAX_BODY_BYTES = 8 << 20


def create_app(
    llm: AsyncLLM,
    *,
    adapter_roots: Sequence[str | Path] = (),
    enable_adapter_loading: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    request_timeout: float | None = None,
) -> FastAPI:
    """An OpenAI-compatible application over a running engine, which it does not shut down.

    Args:
        adapter_roots: folders that clients may load adapters from.
        enable_adapter_loading: whether they may at all.
        max_body_bytes: a larger request is answered 413 before it is parsed.
        request_timeout: most seconds that a generation may take; a request may ask for fewer.

    Raises:
        ConfigurationError: loading is on without a root, a root is given without loading, or a root is no folder.
    """
    roots = permitted_roots(adapter_roots, enable_adapter_loading=enable_adapter_loading)
    # A trailing slash is another path, not a redirect: /v1/models/ would be the model with the empty name.
    app = FastAPI(title="Graft", redirect_slashes=False)
    for router in (
        completion_routes(llm, request_timeout=request_timeout),
        chat_routes(llm, request_timeout=request_timeout),
        model_routes(llm),
        adapter_routes(llm, roots),
    ):
        app.include_router(router)

    @app.get("/health")
    async def health() -> Response:
        if not llm.is_running:
            raise EngineClosed("the engine is not running", do="restart the server")
        return JSONResponse({"status": "ok"})

    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    return app
