"""What an engine has done so far, in plain numbers. Knows nothing of how they are published."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from graftlm.engine.histogram import Histogram
from graftlm.engine.job import Job
from graftlm.engine.model_labels import OTHER, ModelLabels

# Models whose numbers are kept apart. Each has four histograms: some 60 series in Prometheus.
MAX_MODELS = 100
# Of whole requests, and of single tokens and steps.
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def _of_requests() -> Histogram:
    return Histogram(bounds=REQUEST_SECONDS)


def _of_tokens() -> Histogram:
    return Histogram(bounds=TOKEN_SECONDS)


@dataclass(kw_only=True)
class ModelMetrics:
    """Of one adapter, or of the base.

    num_answers: that ended, by finish reason. prompt_tokens, cached_tokens: of the requests that began, and how many of
        those tokens the prefix cache had. generated_tokens: of all answers.
    load_time: seconds that reading its weights took, each time.
    queue_wait: seconds until a request first computes. time_to_first_token, latency: seconds until the first token, and
        until the end. inter_token: seconds between two tokens of an answer.
    """

    num_answers: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    load_time: Histogram = field(default_factory=_of_requests)
    queue_wait: Histogram = field(default_factory=_of_requests)
    time_to_first_token: Histogram = field(default_factory=_of_requests)
    latency: Histogram = field(default_factory=_of_requests)
    inter_token: Histogram = field(default_factory=_of_tokens)

    def add(self, other: ModelMetrics) -> None:
        """Count what another model has done too."""
        self.num_answers.update(other.num_answers)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generated_tokens += other.generated_tokens
        for name in ("load_time", "queue_wait", "time_to_first_token", "latency", "inter_token"):
            getattr(self, name).add(getattr(other, name))


@dataclass(frozen=True, kw_only=True)
class EngineNumbers:
    """models: by name, the most used ones; the others together as "other". steps: seconds that each took."""

    models: Mapping[str, ModelMetrics]
    steps: Histogram


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """How full an engine is.

    num_running, num_waiting: answers. num_adapters: in memory. adapter_bytes: of those, and of what is being read.
    resident: the digests of those in memory, weighted sums included.
    is_resident: of every adapter that has been read, by name, whether it is in memory now.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_adapters: int
    adapter_bytes: int
    resident: frozenset[str]
    is_resident: Mapping[str, bool]


class EngineMetrics:
    """Counts while an engine runs. The engine's thread tells it what happens; any thread may read.

    Args:
        base_name: under which requests without an adapter are counted.
        clock: seconds, as in `RequestTimings`.
    """

    def __init__(
        self, *, base_name: str, max_models: int = MAX_MODELS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._base_name = base_name
        self._clock = clock
        self._labels = ModelLabels(max_models)
        self._models: dict[str, ModelMetrics] = {}
        self._steps = Histogram(bounds=TOKEN_SECONDS)
        # Of each job that has begun, when its answers got their last tokens, by their index.
        self._last_tokens: dict[str, dict[int, float]] = {}
        self._lock = threading.Lock()

    def scheduled(self, job: Job) -> None:
        """Tokens of a job are in the next step."""
        if job.job_id in self._last_tokens:
            return
        with self._lock:
            self._last_tokens[job.job_id] = {}
            model = self._use(self._name(job))
            model.prompt_tokens += len(job.prompt_token_ids)
            model.cached_tokens += job.num_cached_tokens
            model.queue_wait.observe(self._clock() - job.timings.arrived)

    def produced(self, tokens: Iterable[tuple[Job, int]]) -> None:
        """Answers have a token more each, at the same time: their jobs, and which of the job's answers it is."""
        now = self._clock()
        with self._lock:
            for job, index in tokens:
                last_tokens = self._last_tokens[job.job_id]
                model = self._model(job)
                model.generated_tokens += 1
                if not last_tokens:
                    model.time_to_first_token.observe(now - job.timings.arrived)
                elif index in last_tokens:
                    model.inter_token.observe(now - last_tokens[index])
                last_tokens[index] = now

    def ended(self, job: Job) -> None:
        """A job is over, whatever came of it."""
        begun = self._last_tokens.pop(job.job_id, None)
        with self._lock:
            model = self._model(job) if begun is not None else self._use(self._name(job))
            model.num_answers.update(request.finish_reason or "abort" for request in job.requests)
            model.latency.observe(self._clock() - job.timings.arrived)

    def loaded(self, name: str, seconds: float) -> None:
        """The weights of an adapter, or of a weighted sum, were read. Whose numbers are kept apart, requests decide."""
        with self._lock:
            self._models.setdefault(self._labels.know(name), ModelMetrics()).load_time.observe(seconds)

    def stepped(self, seconds: float) -> None:
        """A step was computed."""
        with self._lock:
            self._steps.observe(seconds)

    def read(self) -> EngineNumbers:
        """The numbers as they are now."""
        with self._lock:
            return EngineNumbers(models=copy.deepcopy(self._models), steps=copy.deepcopy(self._steps))

    def _name(self, job: Job) -> str:
        return self._base_name if job.adapter is None else job.adapter.name

    def _model(self, job: Job) -> ModelMetrics:
        label = self._labels.label(self._name(job))
        model = self._models.get(label)
        if model is None:
            # Not by `setdefault`: this is asked for every token, and new numbers are made slowly.
            model = self._models[label] = ModelMetrics()
        return model

    def _use(self, name: str) -> ModelMetrics:
        label, replaced = self._labels.use(name)
        if replaced is not None:
            # No counter ever falls: what was counted stays in the sum, and a newcomer begins at nought.
            self._models.setdefault(OTHER, ModelMetrics()).add(self._models.pop(replaced, ModelMetrics()))
        return self._models.setdefault(label, ModelMetrics())
