"""GET /metrics: the engine's numbers, and the server's own, in Prometheus's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.executor import WorkerInfo, WorkerLoad, WorkerWork
from graftlm.engine.histogram import Histogram
from graftlm.engine.metrics import EngineNumbers, EngineState, ModelMetrics
from graftlm.server.callers import require_metrics
from graftlm.server.errors import UNFORESEEN, error_code_of

MODEL = "model_name"
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, kw_only=True)
class ModelSeries:
    """A counter, or a histogram, of each model. `name` is without the `_total` that Prometheus gives counters."""

    name: str
    text: str
    read: Callable[[ModelMetrics], int | Histogram]


@dataclass(frozen=True, kw_only=True)
class WorkerSeries:
    """A number of each stage, known under its first worker. `name` is without the `_total` that counters get."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    read: Callable[[WorkerWork], float]


@dataclass(frozen=True, kw_only=True)
class ReplicaGauge:
    """A number of each replica that rises and falls."""

    name: str
    text: str
    read: Callable[[WorkerLoad], float]


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A number of the engine as a whole that rises and falls."""

    name: str
    text: str
    read: Callable[[EngineState], float]


MODEL_SERIES = (
    ModelSeries(
        name="graft_prompt_tokens",
        text="Tokens of the prompts of requests that began.",
        read=lambda model: model.prompt_tokens,
    ),
    ModelSeries(
        name="graft_generation_tokens",
        text="Tokens generated.",
        read=lambda model: model.generated_tokens,
    ),
    ModelSeries(
        name="graft_prefix_cache_queries",
        text="Tokens of prompts that were looked for in the prefix cache.",
        read=lambda model: model.prompt_tokens,
    ),
    ModelSeries(
        name="graft_prefix_cache_hits",
        text="Tokens of prompts that the prefix cache had.",
        read=lambda model: model.cached_tokens,
    ),
    ModelSeries(
        name="graft_adapter_load_seconds",
        text="Reading, checking and compiling an adapter's weights, each time that was done.",
        read=lambda model: model.load_time,
    ),
    ModelSeries(
        name="graft_request_queue_time_seconds",
        text="From a request's arrival until it first computes.",
        read=lambda model: model.queue_wait,
    ),
    ModelSeries(
        name="graft_time_to_first_token_seconds",
        text="From a request's arrival to its first token.",
        read=lambda model: model.time_to_first_token,
    ),
    ModelSeries(
        name="graft_inter_token_latency_seconds",
        text="Between two tokens of an answer.",
        read=lambda model: model.inter_token,
    ),
    ModelSeries(
        name="graft_e2e_request_latency_seconds",
        text="From a request's arrival to its end.",
        read=lambda model: model.latency,
    ),
)
ANSWERS = ("graft_request_success", "Answers that ended, by finish reason: stop, length or abort.")
STEPS = ("graft_step_seconds", "What a step of the engine took.")
HIT_RATIO = ("graft_prefix_cache_hit_ratio", "Of all prompt tokens so far, how many the prefix cache had, from 0 to 1.")
RESIDENT = ("graft_adapter_resident", "Whether the adapter is in memory now: 1 or 0.")
GAUGES = (
    Gauge(name="graft_num_requests_running", text="Answers being computed.", read=lambda state: state.num_running),
    Gauge(name="graft_num_requests_waiting", text="Answers in the queue.", read=lambda state: state.num_waiting),
    Gauge(
        name="graft_kv_cache_usage_perc",
        text="Blocks of the KV cache that are held, from 0 to 1.",
        read=lambda state: 1 - state.num_free_blocks / state.num_blocks,
    ),
    Gauge(
        name="graft_kv_cache_free_blocks",
        text="Blocks of the KV cache that nobody holds.",
        read=lambda state: state.num_free_blocks,
    ),
    Gauge(name="graft_adapters", text="Adapters in memory.", read=lambda state: state.num_adapters),
    Gauge(name="graft_adapter_bytes", text="Memory that adapters take.", read=lambda state: state.adapter_bytes),
)
WORKER = "worker"
WORKER_LABELS = (WORKER, "node", "layers", "rank", "replica")
WORKERS = ("graft_workers", "Processes that compute for the engine, by state: running, spare or draining.")
LOST_WORKERS = ("graft_workers_lost", "Workers that died or did not answer, and were replaced.")
MOVES = (
    "graft_worker_moves",
    "Times that a worker's layers went to another, or became others, though none was lost.",
)
WORKER_STATE = ("graft_worker_up", "1 for every worker that has layers; they are in its labels.")
WORKER_SERIES = (
    WorkerSeries(name="graft_worker_steps", kind="counter", text="Steps of a stage.", read=lambda work: work.num_steps),
    WorkerSeries(
        name="graft_worker_replayed_tokens",
        kind="counter",
        text="Tokens that a stage computed again because the worker that had it before was lost.",
        read=lambda work: work.num_replayed_tokens,
    ),
    WorkerSeries(
        name="graft_worker_compute_seconds",
        kind="counter",
        text="What a stage's steps took in its workers.",
        read=lambda work: work.compute_seconds,
    ),
    WorkerSeries(
        name="graft_worker_idle_seconds",
        kind="counter",
        text="What a stage waited for steps that were on their way to it.",
        read=lambda work: work.idle_seconds,
    ),
    WorkerSeries(
        name="graft_worker_hop_bytes",
        kind="counter",
        text="Hidden states and logits sent to a stage and received from it.",
        read=lambda work: work.hop_bytes,
    ),
    WorkerSeries(
        name="graft_worker_adapter_bytes",
        kind="gauge",
        text="Memory that adapters take on a stage's first rank.",
        read=lambda work: work.adapter_bytes,
    ),
)
REPLICA_GAUGES = (
    ReplicaGauge(
        name="graft_replica_requests_running",
        text="Answers being computed by a replica.",
        read=lambda load: load.num_running,
    ),
    ReplicaGauge(
        name="graft_replica_requests_waiting",
        text="Answers in a replica's queue.",
        read=lambda load: load.num_waiting,
    ),
    ReplicaGauge(
        name="graft_replica_kv_cache_usage_perc",
        text="Blocks of a replica's KV cache that are held, from 0 to 1.",
        read=lambda load: load.kv_cache_usage,
    ),
)
WORKER_ADAPTERS = ("graft_worker_adapters", "Adapters that a worker holds weights of.")
REPLIES = ("graft_http_requests", "HTTP requests that were answered, by status.")
ERRORS = ("graft_errors", "Errors that clients were told, by code; those inside of a stream included.")


def metric_table() -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, labels and meaning of everything published."""
    for series in MODEL_SERIES:
        is_histogram = isinstance(series.read(ModelMetrics()), Histogram)
        name = series.name if is_histogram else f"{series.name}_total"
        yield name, "histogram" if is_histogram else "counter", MODEL, series.text
    yield f"{ANSWERS[0]}_total", "counter", f"{MODEL}, finished_reason", ANSWERS[1]
    yield RESIDENT[0], "gauge", MODEL, RESIDENT[1]
    yield STEPS[0], "histogram", "", STEPS[1]
    yield HIT_RATIO[0], "gauge", "", HIT_RATIO[1]
    for gauge in GAUGES:
        yield gauge.name, "gauge", "", gauge.text
    yield WORKERS[0], "gauge", "state", WORKERS[1]
    yield f"{LOST_WORKERS[0]}_total", "counter", "", LOST_WORKERS[1]
    yield f"{MOVES[0]}_total", "counter", "", MOVES[1]
    yield WORKER_STATE[0], "gauge", ", ".join(WORKER_LABELS), WORKER_STATE[1]
    for worker in WORKER_SERIES:
        name = f"{worker.name}_total" if worker.kind == "counter" else worker.name
        yield name, worker.kind, WORKER, worker.text
    for replica in REPLICA_GAUGES:
        yield replica.name, "gauge", WORKER, replica.text
    yield WORKER_ADAPTERS[0], "gauge", WORKER, WORKER_ADAPTERS[1]
    yield f"{REPLIES[0]}_total", "counter", "status", REPLIES[1]
    yield f"{ERRORS[0]}_total", "counter", "code", ERRORS[1]


class EngineCollector(Collector):
    """Reads an engine's numbers when Prometheus asks for them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: registering must not need a running engine."""
        return ()

    def collect(self) -> Iterator[Family]:
        numbers, state = self._llm.read_metrics()
        yield from (_series_of_models(series, numbers) for series in MODEL_SERIES)
        answers = CounterMetricFamily(*ANSWERS, labels=[MODEL, "finished_reason"])
        for name, model in numbers.models.items():
            for reason, count in model.num_answers.items():
                answers.add_metric([name, reason], count)
        yield answers
        resident = GaugeMetricFamily(*RESIDENT, labels=[MODEL])
        for name in numbers.models.keys() & state.is_resident.keys():
            resident.add_metric([name], state.is_resident[name])
        yield resident
        steps = HistogramMetricFamily(*STEPS)
        steps.add_metric([], *_buckets(numbers.steps))
        yield steps
        yield GaugeMetricFamily(*HIT_RATIO, value=_hit_ratio(numbers))
        for gauge in GAUGES:
            yield GaugeMetricFamily(gauge.name, gauge.text, value=gauge.read(state))
        yield CounterMetricFamily(*LOST_WORKERS, value=self._llm.num_lost_workers)
        yield CounterMetricFamily(*MOVES, value=self._llm.num_moves)
        yield from _series_of_workers(self._llm.workers)


class HTTPMetrics:
    """Middleware that counts replies and the errors in them."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._replies = Counter(*REPLIES, ["status"], registry=registry)
        self._errors = Counter(*ERRORS, ["code"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def watching(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._replies.labels(message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception:
            # Answered further out, by the handler for what nobody foresaw.
            self._replies.labels(500).inc()
            self._errors.labels(UNFORESEEN).inc()
            raise
        finally:
            if (code := error_code_of(HTTPConnection(scope))) is not None:
                self._errors.labels(code).inc()


def metric_routes(registry: CollectorRegistry) -> APIRouter:
    router = APIRouter(dependencies=[Depends(require_metrics)])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return router


def _series_of_models(series: ModelSeries, numbers: EngineNumbers) -> Family:
    is_histogram = isinstance(series.read(ModelMetrics()), Histogram)
    family: Family
    if is_histogram:
        family = HistogramMetricFamily(series.name, series.text, labels=[MODEL])
    else:
        family = CounterMetricFamily(series.name, series.text, labels=[MODEL])
    for name, model in numbers.models.items():
        value = series.read(model)
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            family.add_metric([name], *_buckets(value))
        else:
            assert isinstance(value, int)
            family.add_metric([name], value)
    return family


def _series_of_workers(workers: Sequence[WorkerInfo]) -> Iterator[Family]:
    states = GaugeMetricFamily(*WORKERS, labels=["state"])
    for state in ("running", "spare", "draining"):
        states.add_metric([state], sum(worker.state == state for worker in workers))
    yield states
    # What is in the place of one that drains has its id.
    workers = [worker for worker in workers if worker.state != "draining"]
    up = GaugeMetricFamily(*WORKER_STATE, labels=WORKER_LABELS)
    adapters = GaugeMetricFamily(*WORKER_ADAPTERS, labels=[WORKER])
    for worker in workers:
        if worker.layers is not None:
            start, stop = worker.layers
            labels = [worker.id, worker.node, f"{start}-{stop - 1}", str(worker.rank or 0), worker.replica or ""]
            up.add_metric(labels, 1)
            adapters.add_metric([worker.id], len(worker.adapters))
    yield up
    yield adapters
    for series in WORKER_SERIES:
        family = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
        values = family(series.name, series.text, labels=[WORKER])
        for worker in workers:
            if worker.work is not None:
                values.add_metric([worker.id], series.read(worker.work))
        yield values
    for gauge in REPLICA_GAUGES:
        loads = GaugeMetricFamily(gauge.name, gauge.text, labels=[WORKER])
        for worker in workers:
            if worker.load is not None:
                loads.add_metric([worker.id], gauge.read(worker.load))
        yield loads


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Counts up to each bound, as Prometheus wants them, and the sum of the values."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total


def _hit_ratio(numbers: EngineNumbers) -> float:
    looked_for = sum(model.prompt_tokens for model in numbers.models.values())
    return sum(model.cached_tokens for model in numbers.models.values()) / looked_for if looked_for else 0.0
