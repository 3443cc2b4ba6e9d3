"""Whole engines in processes of their own, which are killed and frozen by the system."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from graftlm import LLM, AsyncLLM, SamplingParams
from graftlm.cli import app
from graftlm.engine.executor import WorkerInfo
from graftlm.engine.structured_output import StructuredOutput
from graftlm.errors import ConfigurationError, InvalidRequest
from tests.distributed.rig import OPTIONS, answers, tokens
from tests.parity.oracle import prompt_of
from tests.server.live_server import LiveServer, error_of, serving

pytestmark = pytest.mark.long

NAMES = ["plain", "dora", "late"]
PATIENCE_SECONDS = 4.0
# Two processes that start together on a busy machine take more than a minute.
DEADLINE_SECONDS = 240.0
REPLICAS = {"replicas": 2, "worker_cpus": 1, "worker_timeout_seconds": PATIENCE_SECONDS, **OPTIONS}
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=11, n=2, logprobs=2, prompt_logprobs=0, ignore_eos=True)


def replicas(engine: LLM | AsyncLLM) -> list[WorkerInfo]:
    """Without the spare."""
    return [worker for worker in engine.workers if worker.state == "running"]


def test_replicas_answer_as_one_process(cluster: None, base: Path, adapters: dict[str, Path], local: LLM) -> None:
    """Also when one of them is dead and nobody has noticed."""
    llm = LLM(base, adapters=adapters, **REPLICAS)
    names = list(adapters)
    assert [worker.layers for worker in replicas(llm)] == [(0, 4), (0, 4)]
    processes = [psutil.Process(worker.pid) for worker in replicas(llm)]
    assert os.getpid() not in {process.pid for process in processes}
    assert tokens(answers(llm, names)) == tokens(answers(local, names))
    ids = {"prompt_token_ids": list(prompt_of(12, 5))}
    form = SamplingParams(max_tokens=20, seed=5, structured=StructuredOutput(regex="[a-f]{12}"))
    for params, adapter in ((SAMPLED, "dora"), (SAMPLED, {"plain": 0.5, "late": -0.75}), (form, None)):
        [ours], [theirs] = (engine.generate([ids], params, adapter=adapter) for engine in (llm, local))
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
        assert [each.text for each in ours.outputs] == [each.text for each in theirs.outputs]
        assert (ours.prompt_logprobs is None) == (params is form)
        assert (ours.adapter, ours.finished) == (theirs.adapter, True)
    processes[0].send_signal(signal.SIGKILL)
    assert tokens(answers(llm, names)) == tokens(answers(local, names))
    assert llm.num_lost_workers == 1
    with pytest.raises(InvalidRequest, match="logits"):
        llm.logits([1, 2])
    processes += [psutil.Process(worker.pid) for worker in llm.workers]
    llm.shutdown()
    assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []


@pytest.fixture(scope="module")
def roots(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    for name in NAMES:
        (folder / name).symlink_to(adapters[name])
    return folder


@pytest.fixture(scope="module")
def engine(cluster: None, base: Path, adapters: dict[str, Path]) -> AsyncLLM:
    return AsyncLLM(base, name="base", adapters={"plain": adapters["plain"]}, **REPLICAS)


@pytest.fixture(scope="module")
def server(engine: AsyncLLM, adapters: dict[str, Path]) -> Iterator[LiveServer]:
    with serving(engine, adapter_roots=[path.parent for path in adapters.values()]) as live:
        yield live


class Traffic:
    """Streams of many requests at once over HTTP, and what one process answers to them."""

    def __init__(self, server: LiveServer, local: LLM) -> None:
        self._server = server
        self._local = local

    def check(self, names: list[str | None], disturb: Callable[[int], None] = lambda _: None) -> None:
        """One request for each of the names, all at once. disturb: told after each delta how many there have been."""
        lock, count = threading.Lock(), 0

        def read(seed: int, name: str | None) -> str:
            nonlocal count
            body = {
                "model": name or "base",
                "prompt": list(prompt_of(30, seed % 7)),
                "max_tokens": 24,
                "temperature": 0.8,
                "seed": seed,
                "ignore_eos": True,
                "stream": True,
            }
            text = ""
            with self._server.http.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200, reply.read()
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
                        with lock:
                            count += 1
                            disturb(count)
            assert line == "" or line == "data: [DONE]"
            return text

        with ThreadPoolExecutor(len(names)) as pool:
            got = list(pool.map(read, range(len(names)), names))
        assert got == [self._expected(seed, name) for seed, name in enumerate(names)]

    def _expected(self, seed: int, name: str | None) -> str:
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True)
        [output] = self._local.generate([{"prompt_token_ids": list(prompt_of(30, seed % 7))}], params, adapter=name)
        return output.outputs[0].text


@pytest.fixture
def traffic(server: LiveServer, local: LLM) -> Traffic:
    return Traffic(server, local)


def load(server: LiveServer, name: str, path: Path, **more: bool) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def wait_until(server: LiveServer, holds: Callable[[], bool]) -> None:
    """Meanwhile the server is asked whether it is ready, which it is all the time."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert server.http.get("/ready").status_code == 200
        assert time.monotonic() < deadline
        # The processes that are waited for need the processors.
        time.sleep(0.05)


def spares(engine: AsyncLLM) -> list[int]:
    """Processes that have everything imported and nothing loaded."""
    return [worker.pid for worker in engine.workers if worker.state == "spare"]


def wait_for_replicas(server: LiveServer, engine: AsyncLLM, gone: set[int]) -> None:
    """Until both are there, and none of the processes that are gone."""

    def are_there() -> bool:
        pids = {worker.pid for worker in replicas(engine)}
        return len(pids) == 2 and not pids & gone

    wait_until(server, are_there)


@pytest.mark.timeout(900)
def test_r107_an_adapter_that_is_loaded_answers_on_every_replica_and_on_new_ones(
    server: LiveServer, engine: AsyncLLM, adapters: dict[str, Path], traffic: Traffic
) -> None:
    """R106, R107: replicas are killed and frozen among streams, and not one of them notices."""
    error_of(server.complete(model="dora", prompt="x"), 404)
    assert load(server, "dora", adapters["dora"]).status_code == 200
    many: list[str | None] = ["dora", "plain", None, "dora"] * 5
    traffic.check(many)
    first = {worker.pid for worker in replicas(engine)}
    victim = replicas(engine)[0].pid
    traffic.check(many, lambda count: os.kill(victim, signal.SIGKILL) if count == 50 else None)
    wait_for_replicas(server, engine, {victim})
    wait_until(server, lambda: len(spares(engine)) == 1)
    [spare] = spares(engine)
    frozen = next(worker.pid for worker in replicas(engine) if worker.pid in first)
    traffic.check(many, lambda count: os.kill(frozen, signal.SIGSTOP) if count == 50 else None)
    wait_for_replicas(server, engine, {victim, frozen})
    assert spare in {worker.pid for worker in replicas(engine)}
    # Both are others now, and nobody has told them of the adapters.
    traffic.check(many)
    assert engine.num_lost_workers == 2
    assert engine.num_unfinished_requests == 0
    assert not psutil.pid_exists(frozen)


def test_names_change_as_in_one_process(server: LiveServer, adapters: dict[str, Path], local: LLM) -> None:
    prompt = list(prompt_of(9, 3))

    def text_of(name: str) -> str:
        params = SamplingParams(max_tokens=8, temperature=0)
        return local.generate([{"prompt_token_ids": prompt}], params, adapter=name)[0].outputs[0].text

    assert text_of("late") != text_of("vera")
    assert load(server, "it", adapters["late"]).status_code == 200
    assert server.text(model="it", prompt=prompt) == text_of("late")
    assert load(server, "it", adapters["vera"], load_inplace=True).status_code == 200
    assert server.text(model="it", prompt=prompt) == text_of("vera")
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "it"}).status_code == 200
    error_of(server.complete(model="it", prompt=prompt), 404)


def test_a_broken_adapter_is_refused_before_any_replica_hears_of_it(
    server: LiveServer, adapters: dict[str, Path], tmp_path: Path
) -> None:
    broken = adapters["plain"].parent / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("{")
    error_of(load(server, "broken", broken))
    error_of(server.complete(model="broken", prompt="x"), 404)


def test_an_abort_and_a_deadline_free_what_a_replica_holds(engine: AsyncLLM, server: LiveServer) -> None:
    body = {"model": "plain", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        next(reply.iter_lines())
    error_of(server.complete(**body, timeout=0.05), 504)

    def are_free() -> bool:
        loads = [worker.load for worker in replicas(engine)]
        return all(load is not None and load.num_running == 0 == load.kv_cache_usage for load in loads)

    wait_until(server, are_free)


def test_replicas_are_seen(server: LiveServer, engine: AsyncLLM) -> None:
    families = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    ids = {worker.id for worker in replicas(engine)}
    for name in ("graft_worker_up", "graft_replica_requests_running", "graft_replica_kv_cache_usage_perc"):
        assert {sample.labels["worker"] for sample in families[name].samples} == ids
    steps = {sample.labels["worker"]: sample.value for sample in families["graft_worker_steps"].samples}
    assert steps.keys() == ids
    assert min(steps.values()) > 0
    status = server.http.get("/status").json()["engine"]["workers"]
    assert [worker["load"]["num_waiting"] for worker in status if worker["state"] == "running"] == [0, 0]
    shown = CliRunner().invoke(app, ["cluster", "status", "--url", server.url], env={"COLUMNS": "200", "TERM": "dumb"})
    assert len(re.findall(r"replica-\d+", shown.stdout)) == 2
    assert " running " in shown.stdout


def test_a_replica_is_drained_under_traffic(server: LiveServer, engine: AsyncLLM, traffic: Traffic) -> None:
    victim = next(worker for worker in replicas(engine) if worker.id == "replica-1")
    process = psutil.Process(victim.pid)
    lost, drained = engine.num_lost_workers, threading.Event()

    def answer() -> None:
        while not drained.is_set():
            traffic.check(["plain", None] * 4)

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        try:
            result = CliRunner().invoke(app, ["cluster", "drain", victim.id, "--url", server.url])
        finally:
            drained.set()
        answered.result(DEADLINE_SECONDS)
    assert re.fullmatch(r"replica-1: is now process \d+ on node \w{12}\n", result.stdout), result.stderr
    assert psutil.wait_procs([process], timeout=DEADLINE_SECONDS)[1] == []
    assert victim.pid not in {worker.pid for worker in replicas(engine)}
    assert (engine.num_moves, engine.num_lost_workers) == (1, lost)
    unknown = server.http.post("/v1/drain_worker", json={"worker": "replica-3"})
    assert error_of(unknown, 404)["code"] == "not_found"


def test_more_replicas_than_cores_are_refused(cluster: None, base: Path) -> None:
    with pytest.raises(ConfigurationError, match="too few cores"):
        LLM(base, replicas=2, worker_cpus=100)
