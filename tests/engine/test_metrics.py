"""What is counted, and for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm import LLM, SamplingParams
from graftlm.engine.histogram import Histogram
from graftlm.engine.job import Job
from graftlm.engine.metrics import EngineMetrics, EngineNumbers, ModelMetrics
from graftlm.engine.model_labels import OTHER, ModelLabels
from graftlm.engine.request import Request
from graftlm.text import load_tokenizer
from tests.engine.rig import BLOCK_BYTES, greedy, prompt


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram(bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 10.0


def test_the_most_used_models_have_labels_of_their_own() -> None:
    labels = ModelLabels(2)
    assert [labels.use(name) for name in ("a", "a", "b", "c")] == [("a", None), ("a", None), ("b", None), (OTHER, None)]
    # As often as the least used is not more often.
    assert labels.use("c") == ("c", "b")
    assert labels.label("b") == OTHER
    assert labels.label("a") == "a"


def test_what_is_only_loaded_gives_its_place_to_what_is_asked_for() -> None:
    labels = ModelLabels(2)
    assert [labels.know(name) for name in ("loaded", "again", "again", "late")] == ["loaded", "again", "again", OTHER]
    assert labels.use("again") == ("again", None)
    assert labels.use("asked") == ("asked", "loaded")
    assert labels.know("loaded") == OTHER
    assert labels.use("third") == (OTHER, None)


def test_adapters_that_nobody_asks_for_take_no_label_from_a_model_that_is_asked_for(llama: Path) -> None:
    metrics = EngineMetrics(base_name="base", max_models=2)
    for name in ("idle-0", "idle-1", "idle-2"):
        for _ in range(3):
            metrics.loaded(name, 0.5)
    request = Request(
        request_id="0-0",
        index=0,
        prompt_token_ids=(1,),
        params=SamplingParams(),
        max_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
    )
    job = Job(
        job_id="0",
        prompt=None,
        prompt_token_ids=(1,),
        requests=(request,),
        texts=(),
        adapter=None,
        tokenizer=load_tokenizer(llama),
    )
    metrics.scheduled(job)
    metrics.ended(job)
    models = metrics.read().models
    assert models["base"].num_answers == Counter(abort=1)
    # No load is lost, whoever it is counted for.
    assert sum(sum(model.load_time.counts) for model in models.values()) == 9


@given(st.lists(st.integers(0, 400).map(str), max_size=600))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_there_are_never_more_labels_than_the_limit_and_no_count_is_lost(names: list[str]) -> None:
    labels = ModelLabels(5)
    counted: dict[str, ModelMetrics] = {}
    for number, name in enumerate(names, 1):
        label, replaced = labels.use(name)
        if replaced is not None:
            counted.setdefault(OTHER, ModelMetrics()).add(counted.pop(replaced))
        counted.setdefault(label, ModelMetrics()).num_answers["stop"] += 1
        assert len(counted.keys() - {OTHER}) <= 5
        assert sum(model.num_answers["stop"] for model in counted.values()) == number


def test_a_model_that_is_used_much_gets_a_label_whatever_else_came_before() -> None:
    labels = ModelLabels(4)
    for number in range(1000):
        labels.use(f"rare-{number}")
    assert "hot" in {labels.use("hot")[0] for _ in range(100)}


@pytest.fixture(scope="module")
def numbers(llm_with_adapters: LLM) -> EngineNumbers:
    llm = llm_with_adapters
    llm.generate([prompt(40)], greedy(6, ignore_eos=True), adapter="red")
    llm.generate([prompt(40)], greedy(6, ignore_eos=True), adapter="red")
    llm.generate([prompt(5), prompt(6)], greedy(4, ignore_eos=True, n=2))
    llm.generate([prompt(5)], greedy(4, stop_token_ids=range(256)), adapter="blue")
    return llm.metrics


@pytest.fixture(scope="module")
def llm_with_adapters(llama: object, adapters: dict[str, object]) -> Iterator[LLM]:
    llm = LLM(llama, name="base", adapters=adapters, kv_cache_bytes=64 * BLOCK_BYTES)  # type: ignore[arg-type]
    yield llm
    llm.shutdown()


def test_tokens_and_answers_are_counted_for_each_model(numbers: EngineNumbers) -> None:
    red, blue, base = (numbers.models[name] for name in ("red", "blue", "base"))
    assert set(numbers.models) == {"red", "green", "blue", "base"}
    # Nobody asked for it, but it was read.
    assert numbers.models["green"] == ModelMetrics(load_time=numbers.models["green"].load_time)
    assert [sum(numbers.models[name].load_time.counts) for name in ("red", "green", "blue", "base")] == [1, 1, 1, 0]
    assert (red.prompt_tokens, red.cached_tokens, red.generated_tokens) == (80, 32, 12)
    assert (base.prompt_tokens, base.generated_tokens) == (11, 16)
    assert red.num_answers == Counter(length=2)
    assert base.num_answers == Counter(length=4)
    assert blue.num_answers == Counter(stop=1)


def test_times_are_counted_once_for_each_request_and_each_gap_between_tokens(numbers: EngineNumbers) -> None:
    red, base = numbers.models["red"], numbers.models["base"]
    for histogram in (red.queue_wait, red.time_to_first_token, red.latency):
        assert sum(histogram.counts) == 2
    assert red.queue_wait.total <= red.time_to_first_token.total <= red.latency.total
    assert sum(red.inter_token.counts) == 2 * 5
    # Four answers of four tokens, whose first ones have nothing before them.
    assert sum(base.inter_token.counts) == 4 * 3
    assert sum(base.latency.counts) == 2
    assert sum(numbers.steps.counts) >= 6 + 6 + 4
