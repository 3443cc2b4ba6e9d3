"""The application: every route, the size limit and the error shape, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from graftlm.engine.async_llm import AsyncLLM
from graftlm.server.access_log import AccessLog
from graftlm.server.adapters import adapter_routes, permitted_sources
from graftlm.server.arrival import RECEIVE_TIMEOUT, BodyArrival
from graftlm.server.authentication import Authentication
from graftlm.server.body_limit import BodyLimit
from graftlm.server.chat import chat_routes
from graftlm.server.completions import completion_routes
from graftlm.server.cors import cors_options
from graftlm.server.cross_site import CrossSite
from graftlm.server.errors import install_error_handlers
from graftlm.server.fine_tuning.routes import FILES_PATH, MAX_FILE_BYTES, fine_tuning_routes
from graftlm.server.fine_tuning.service import FineTuningService
from graftlm.server.health import health_routes
from graftlm.server.key_file import KeyFile
from graftlm.server.metrics import EngineCollector, HTTPMetrics, metric_routes
from graftlm.server.models import model_routes
from graftlm.server.not_offered import not_offered_routes
from graftlm.server.playground.page import page_routes
from graftlm.server.request_ids import RequestIds
from graftlm.server.responses import response_routes
from graftlm.server.status import status_routes
from graftlm.server.tokenization import tokenization_routes
from graftlm.server.workers import worker_routes
from graftlm.text.tool_calls import named_format

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_BODY_BYTES = 8 << 20


def create_app(
    llm: AsyncLLM,
    *,
    adapter_roots: Sequence[str | Path] = (),
    adapter_hub_ids: Sequence[str] = (),
    enable_adapter_loading: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    receive_timeout: float = RECEIVE_TIMEOUT,
    request_timeout: float | None = None,
    write_access: Callable[[str], None] | None = None,
    keys: KeyFile | None = None,
    fine_tuning: FineTuningService | None = None,
    cors_origins: Sequence[str] = (),
    traces: TracerProvider | None = None,
    tool_call_parser: str | None = None,
) -> FastAPI:
    """An OpenAI-compatible application over a running engine, which it does not shut down.

    Args:
        adapter_roots, adapter_hub_ids: folders that clients may load adapters from, and patterns for hub ids.
        enable_adapter_loading: whether they may at all.
        max_body_bytes: a larger request is answered 413 before it is parsed.
        receive_timeout: most seconds that a body may take to arrive, and as many more for each MiB of it.
        request_timeout: most seconds that a generation may take; a request may ask for fewer.
        fine_tuning: answers /v1/files and /v1/fine_tuning/jobs; without it they are refused.
        write_access: gets one line of JSON for each request, as `AccessLog` describes it.
        keys: who may do what; without it anyone may do everything.
        traces: gets a span for each request, as `Tracing` describes it.
        cors_origins: of web pages whose scripts may use the server, such as https://example.org, or "*" for any.
        tool_call_parser: how the model writes calls of functions, one of `graftlm.text.tool_calls.FORMATS`; by default
            what its chat template says, or its adapter's.

    Raises:
        ConfigurationError: loading is on without anything to load from, or the other way round; a root is no folder; an
            origin is none; there is no such tool_call_parser.
    """
    tool_call_format = None if tool_call_parser is None else named_format(tool_call_parser)
    sources = permitted_sources(adapter_roots, adapter_hub_ids, enable_adapter_loading=enable_adapter_loading)
    metrics = CollectorRegistry()
    metrics.register(EngineCollector(llm))
    # A trailing slash is another path, not a redirect: /v1/models/ would be the model with the empty name.
    # FastAPI's own pages of documentation run scripts from elsewhere.
    app = FastAPI(title="Graft", redirect_slashes=False, docs_url=None, redoc_url=None)
    for router in (
        completion_routes(llm, request_timeout=request_timeout),
        chat_routes(llm, request_timeout=request_timeout, tool_call_format=tool_call_format),
        response_routes(llm, request_timeout=request_timeout, tool_call_format=tool_call_format),
        tokenization_routes(llm),
        model_routes(llm),
        health_routes(llm),
        metric_routes(metrics),
        fine_tuning_routes(llm, fine_tuning),
        adapter_routes(llm, sources),
        status_routes(llm, sources),
        worker_routes(llm),
        page_routes(),
        not_offered_routes(),
    ):
        app.include_router(router)

    install_error_handlers(app)
    # The last one added is the outermost.
    uploads = {} if fine_tuning is None else {FILES_PATH: MAX_FILE_BYTES}
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, exceptions=uploads)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(CrossSite, origins=cors_origins)
    app.add_middleware(BodyArrival, seconds=receive_timeout)
    if traces is not None:
        from graftlm.server.tracing import Tracing

        app.add_middleware(Tracing, provider=traces)
    if cors_origins:
        # Around the authentication: browsers ask beforehand without a key, and show scripts no reply, a 401 included,
        # that lacks these headers.
        app.add_middleware(CORSMiddleware, **cors_options(cors_origins))
    if write_access is not None:
        app.add_middleware(AccessLog, write=write_access)
    app.add_middleware(HTTPMetrics, registry=metrics)
    app.add_middleware(RequestIds)
    return app
