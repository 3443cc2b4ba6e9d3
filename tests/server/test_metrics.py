"""GET /metrics, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from graftlm import AsyncLLM
from graftlm.server.metrics import metric_table
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, open_request, wait_until


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    return AsyncLLM(
        files.base, name="tiny", adapters={"red": files.red, "blue": files.blue}, max_num_seqs=1, kv_cache_bytes=8 << 20
    )


@pytest.fixture(scope="module")
def live(llm: AsyncLLM) -> Iterator[LiveServer]:
    with serving(llm) as running:
        yield running


def read(live: LiveServer) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of the labels' names ...) -> value of every sample."""
    reply = live.http.get("/metrics")
    assert reply.status_code == 200
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_requests_move_the_numbers_of_their_model(live: LiveServer) -> None:
    for _ in range(2):
        assert live.complete(model="red", prompt="x" * 40, max_tokens=5, ignore_eos=True).status_code == 200
    live.text(model="tiny", prompt="hello", max_tokens=3, ignore_eos=True)
    samples = read(live)
    assert samples["graft_prompt_tokens_total", "red"] == 80
    assert samples["graft_prefix_cache_hits_total", "red"] == 32
    assert samples["graft_generation_tokens_total", "red"] == 10
    assert samples["graft_generation_tokens_total", "tiny"] == 3
    assert samples["graft_request_success_total", "length", "red"] == 2
    assert samples["graft_e2e_request_latency_seconds_count", "red"] == 2
    assert samples["graft_time_to_first_token_seconds_count", "red"] == 2
    assert samples["graft_request_queue_time_seconds_count", "red"] == 2
    assert samples["graft_inter_token_latency_seconds_count", "red"] == 8
    assert samples["graft_inter_token_latency_seconds_bucket", "+Inf", "red"] == 8
    assert samples["graft_prefix_cache_hit_ratio",] == pytest.approx(32 / 85)
    assert samples["graft_step_seconds_count",] >= 5 + 5 + 3
    assert samples["graft_adapters",] == 2
    assert samples["graft_adapter_resident", "red"] == samples["graft_adapter_resident", "blue"] == 1
    assert ("graft_adapter_resident", "tiny") not in samples
    assert samples["graft_adapter_load_seconds_count", "red"] == 1
    assert samples["graft_adapter_bytes",] > 0
    assert samples["graft_http_requests_total", "200"] >= 3


def test_gauges_show_what_runs_and_waits_and_fall_again(live: LiveServer, llm: AsyncLLM) -> None:
    idle = read(live)
    connections = [open_request(live, "/v1/completions", {**LONG, "model": "red"}) for _ in range(3)]
    wait_until(lambda: read(live)["graft_num_requests_waiting",] == 2)
    busy = read(live)
    assert busy["graft_num_requests_running",] == 1
    assert busy["graft_kv_cache_free_blocks",] < idle["graft_kv_cache_free_blocks",]
    assert 0 < busy["graft_kv_cache_usage_perc",] < 1
    for connection in connections:
        connection.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)
    done = read(live)
    assert done["graft_num_requests_running",] == done["graft_num_requests_waiting",] == 0
    assert done["graft_kv_cache_usage_perc",] == 0
    assert done["graft_request_success_total", "abort", "red"] == 3


def test_errors_are_counted_by_code_those_inside_of_streams_too(live: LiveServer) -> None:
    def count(code: str) -> float:
        return read(live).get(("graft_errors_total", code), 0)

    before = {code: count(code) for code in ("model_not_found", "unknown_parameter", "deadline_exceeded")}
    error_of(live.complete(model="nobody", prompt="x"), 404)
    error_of(live.complete(model="red", prompt="x", nonsense=1))
    assert live.complete(**LONG, model="red", timeout=1, stream=True).status_code == 200
    error_of(live.complete(**LONG, model="red", timeout=0.05), 504)
    assert count("model_not_found") == before["model_not_found"] + 1
    assert count("unknown_parameter") == before["unknown_parameter"] + 1
    assert count("deadline_exceeded") == before["deadline_exceeded"] + 2


def test_the_documented_table_is_what_is_published(live: LiveServer) -> None:
    live.text(model="red", prompt="hello", ignore_eos=True)
    live.http.get("/nowhere")
    reply = live.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    published = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type)
        for family in parse_open_metrics(reply.text)
    }
    assert {(name, kind) for name, kind, _, _ in metric_table()} == {
        (name, kind) for name, kind in published if not name.endswith("_created")
    }
