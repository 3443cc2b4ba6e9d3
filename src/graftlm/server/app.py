"""The application: every route, the size limit and the error shape, put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import ConfigurationError, EngineClosed
from graftlm.server.adapters import AdapterRoots, adapter_routes
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
) -> FastAPI:
    """An OpenAI-compatible application over a running engine, which it does not shut down.

    Args:
        adapter_roots: folders that clients may load adapters from.
        enable_adapter_loading: whether they may at all.
        max_body_bytes: a larger request is answered 413 before it is parsed.

    Raises:
        ConfigurationError: loading is on without a root, a root is given without loading, or a root is no folder.
    """
    roots = _adapter_roots([Path(root) for root in adapter_roots], enable_adapter_loading)
    # A trailing slash is another path, not a redirect: /v1/models/ would be the model with the empty name.
    app = FastAPI(title="Graft", redirect_slashes=False)
    for router in (completion_routes(llm), chat_routes(llm), model_routes(llm), adapter_routes(llm, roots)):
        app.include_router(router)

    @app.get("/health")
    async def health() -> Response:
        if not llm.is_running:
            raise EngineClosed("the engine is not running", do="restart the server")
        return JSONResponse({"status": "ok"})

    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    return app


def _adapter_roots(folders: Sequence[Path], enable_adapter_loading: bool) -> AdapterRoots | None:
    if enable_adapter_loading != bool(folders):
        raise ConfigurationError(
            "loading adapters over HTTP needs both the permission and a folder to load from",
            got="a permission without a folder" if enable_adapter_loading else "a folder without the permission",
            do="give --enable-adapter-loading and --adapter-root DIR, or neither",
        )
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError("an adapter root is not a folder", got=folder)
    return AdapterRoots(folders) if folders else None
