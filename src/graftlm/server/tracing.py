"""OpenTelemetry spans of requests. Imported only when traces are wanted: the packages are the extra `otel`."""

from __future__ import annotations

import time
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.engine.request_stream import RequestStream
from graftlm.server.callers import caller_of
from graftlm.server.errors import error_code_of
from graftlm.server.request_ids import request_id_of
from graftlm.server.work import work_of

# Asked every few seconds by machines, and about no request.
UNTRACED_PATHS = frozenset({"/health", "/ready", "/metrics"})
_EXPORT_SECONDS = 5


def export_to(endpoint: str) -> TracerProvider:
    """A provider whose spans go to an OTLP collector over HTTP, in the background.

    Args:
        endpoint: such as http://127.0.0.1:4318; `/v1/traces` is added.
    """
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: "graft", SERVICE_VERSION: version("graftlm")}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    """Middleware outside of `Authentication`: one span for each HTTP request, in the trace that its traceparent header
    names, and below it one for each of the engine's requests, with the seconds it waited, computed its prompt and
    generated. Texts are in none of them."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer("graftlm")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED_PATHS:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        parent = TraceContextTextMapPropagator().extract(dict(connection.headers))
        method = scope["method"]
        span = self._tracer.start_span(
            method,
            parent,
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": scope["path"], "graft.request_id": request_id_of(connection)},
        )

        async def watching(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception:
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            if (route := scope.get("route")) is not None:
                # The pattern: a name with the model in it would be one of thousands.
                span.update_name(f"{method} {route.path}")
            _describe(span, connection)
            for stream in work_of(connection).streams:
                self._add_work(stream, set_span_in_context(span))
            span.end()

    def _add_work(self, stream: RequestStream, parent: Context) -> None:
        timings = stream.timings
        now = time.perf_counter()
        offset = time.time() - now
        ended = timings.ended or now
        attributes: dict[str, str | int | float] = {
            "graft.request_id": stream.request_id,
            "graft.adapter": stream.adapter or "",
            "gen_ai.usage.input_tokens": len(stream.prompt_token_ids),
            "gen_ai.usage.output_tokens": stream.num_output_tokens,
            "gen_ai.latency.e2e": ended - timings.arrived,
            "gen_ai.latency.time_in_queue": (timings.begun or ended) - timings.arrived,
        }
        if timings.begun is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = (timings.first_token or ended) - timings.begun
        if timings.first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = timings.first_token - timings.arrived
            attributes["gen_ai.latency.time_in_model_decode"] = ended - timings.first_token
        work = self._tracer.start_span(
            "generate", parent, SpanKind.INTERNAL, attributes, start_time=_nanoseconds(timings.arrived + offset)
        )
        for name, moment in (("begun", timings.begun), ("first token", timings.first_token)):
            if moment is not None:
                work.add_event(name, timestamp=_nanoseconds(moment + offset))
        work.end(_nanoseconds(ended + offset))


def _describe(span: Span, connection: HTTPConnection) -> None:
    tenant, work = caller_of(connection).tenant, work_of(connection)
    if tenant is not None:
        span.set_attribute("graft.tenant", tenant.name)
    if (model := getattr(connection.state, "model", None)) is not None:
        span.set_attribute("gen_ai.request.model", model)
    if (code := error_code_of(connection)) is not None:
        span.set_attribute("error.type", code)
    if work.streams:
        span.set_attribute("gen_ai.usage.input_tokens", work.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", work.num_output_tokens)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
