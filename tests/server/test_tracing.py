"""OpenTelemetry spans of requests, as the SDK's own exporter sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from graftlm import AsyncLLM
from graftlm.errors import ConfigurationError
from graftlm.server.traces import open_traces
from tests.engine.test_step_failure import breaking
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, serving
from tests.server.test_disconnect import LONG, open_request, wait_until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    return AsyncLLM(files.base, name="tiny", adapters={"red": files.red}, kv_cache_bytes=8 << 20)


@pytest.fixture(scope="module")
def traced(llm: AsyncLLM, exporter: InMemorySpanExporter) -> Iterator[LiveServer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(llm, traces=provider) as live:
        yield live


def spans(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The one request's span, which ends last, and those below it."""
    wait_until(lambda: any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()))
    *below, request = exporter.get_finished_spans()
    exporter.clear()
    assert request.context is not None
    for span in below:
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
    return request, below


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_what_it_took(
    traced: LiveServer, exporter: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": TRACEPARENT, "x-request-id": "traced"}
    reply = traced.openai.completions.create(
        model="red",
        prompt=["secret words", "x"],
        max_tokens=5,
        stream=stream,
        extra_body={"ignore_eos": True},
        extra_headers=headers,
    )
    if stream:
        list(reply)
    request, works = spans(exporter)
    assert request.name == "POST /v1/completions"
    assert request.context is not None
    assert f"{request.context.trace_id:x}" == TRACE_ID
    said = attributes(request)
    assert said["http.response.status_code"] == 200
    assert (said["graft.request_id"], said["gen_ai.request.model"]) == ("traced", "red")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (13, 10)
    assert [attributes(work)["gen_ai.usage.input_tokens"] for work in works] == [12, 1]
    for work in works:
        said = attributes(work)
        assert said["graft.adapter"] == "red"
        phases = [said[f"gen_ai.latency.time_in_{phase}"] for phase in ("queue", "model_prefill", "model_decode")]
        assert min(phases) > 0
        assert sum(phases) == pytest.approx(said["gen_ai.latency.e2e"])
        assert sum(phases[:2]) == pytest.approx(said["gen_ai.latency.time_to_first_token"])
        assert [event.name for event in work.events] == ["begun", "first token"]
        assert work.start_time is not None
        assert work.end_time is not None
        assert (work.end_time - work.start_time) / 1e9 == pytest.approx(said["gen_ai.latency.e2e"], abs=1e-3)
    assert "secret" not in request.to_json() + "".join(work.to_json() for work in works)


def test_errors_and_clients_that_leave_are_spans_too(
    traced: LiveServer, llm: AsyncLLM, exporter: InMemorySpanExporter
) -> None:
    traced.http.get("/v1/models/nobody")
    request, works = spans(exporter)
    assert request.name == "GET /v1/models/{model:path}"
    assert attributes(request)["error.type"] == "model_not_found"
    assert (request.status.status_code, works) == (StatusCode.UNSET, [])

    with breaking(llm, RuntimeError("injected")):
        traced.complete(model="red", prompt="x")
    request, [work] = spans(exporter)
    assert request.status.status_code is StatusCode.ERROR
    assert attributes(work)["gen_ai.usage.output_tokens"] == 0

    connection = open_request(traced, "/v1/completions", {**LONG, "model": "red"})
    wait_until(lambda: llm.num_unfinished_requests == 1)
    connection.close()
    request, [work] = spans(exporter)
    assert attributes(request)["http.response.status_code"] == 499


def test_probes_and_metrics_are_no_spans(traced: LiveServer, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert traced.http.get(path).status_code == 200
    traced.http.get("/v1/models")
    request, _ = spans(exporter)
    assert request.name == "GET /v1/models"


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="localhost:4318"):
        open_traces("localhost:4318")
