"""Workers that are processes on Ray, and are killed and frozen by the system."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from graftlm import LLM, AsyncLLM, SamplingParams
from graftlm.cli import app
from graftlm.engine.executor import WorkerInfo
from tests.cli.graft_process import graft_process
from tests.distributed.rig import GREEDY, OPTIONS, answers, assert_same_logits, requests, tokens
from tests.parity.oracle import prompt_of
from tests.tiny import make_llama

pytestmark = pytest.mark.long

NAMES = ["plain", "dora", "ends"]
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
DEADLINE_SECONDS = 60.0
# Of a worker that shows eight times in them that it lives.
PATIENCE_SECONDS = 4.0


@pytest.fixture
def open_engine(cluster: None, base: Path, adapters: dict[str, Path]) -> Callable[[], AsyncLLM]:
    chosen = {name: adapters[name] for name in NAMES}

    def open_() -> AsyncLLM:
        return AsyncLLM(
            base, adapters=chosen, workers=2, steps_in_flight=3, worker_timeout_seconds=PATIENCE_SECONDS, **OPTIONS
        )

    return open_


@pytest.fixture(scope="module")
def expected(local: LLM) -> list[tuple[int, ...]]:
    return tokens(answers(local, NAMES, LONG))


def stages(engine: AsyncLLM) -> list[WorkerInfo]:
    return [worker for worker in engine.workers if worker.state == "running"]


async def wait_for_spare(engine: AsyncLLM) -> WorkerInfo:
    while True:
        for worker in engine.workers:
            if worker.state == "spare":
                return worker
        # Meanwhile the engine's own thread works on something.
        await engine.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1))


async def read_all(engine: AsyncLLM, disturb: Callable[[int], None]) -> list[tuple[int, ...]]:
    """All answers, streamed at once. disturb: told after each delta how many there have been."""
    num_deltas = 0

    async def read(prompt: dict[str, list[int]], name: str | None) -> tuple[int, ...]:
        nonlocal num_deltas
        ids: list[int] = []
        async for delta in engine.stream(prompt, LONG, adapter=name):
            ids.extend(delta.outputs[0].token_ids)
            num_deltas += 1
            disturb(num_deltas)
        return tuple(ids)

    return await asyncio.gather(*(read(*request) for request in zip(*requests(NAMES), strict=True)))


def test_workers_on_ray_answer_as_one_process_to_the_last_bit(
    cluster: None, base: Path, adapters: dict[str, Path], local: LLM
) -> None:
    llm = LLM(base, adapters=adapters, workers=2, steps_in_flight=3, deterministic=True, **OPTIONS)
    same = LLM(base, adapters=adapters, deterministic=True, **OPTIONS)
    names = list(adapters)
    with_logprobs = replace(GREEDY, logprobs=20)
    ours, theirs = (answers(engine, names, with_logprobs) for engine in (llm, same))
    assert [output.outputs for output in ours] == [output.outputs for output in theirs]
    for name in (None, *names):
        ids = prompt_of(30, 99)
        assert torch.equal(llm.logits(ids, adapter=name), same.logits(ids, adapter=name)), name
    assert_same_logits(llm, local, names)
    running = [worker for worker in llm.workers if worker.state == "running"]
    assert [worker.layers for worker in running] == [(0, 2), (2, 4)]
    assert all(psutil.pid_exists(worker.pid) and worker.pid != os.getpid() for worker in running)
    assert set(running[1].adapters) == set(names)
    assert set(running[0].adapters) == set(names) - {"late"}
    processes = [psutil.Process(worker.pid) for worker in llm.workers]
    llm.shutdown()
    assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []


def test_r105_killed_and_frozen_workers_cost_no_token(
    open_engine: Callable[[], AsyncLLM], local: LLM, expected: list[tuple[int, ...]]
) -> None:
    """A worker is killed during a prompt; then, among streams, one is killed and the other stopped without dying."""
    long_prompt = {"prompt_token_ids": [token % 251 for token in range(480)]}

    async def kill_during_prompt(engine: AsyncLLM) -> None:
        stream = await engine.add_request(long_prompt, GREEDY, adapter="dora")
        # Its prompt takes twenty steps.
        os.kill(stages(engine)[1].pid, signal.SIGKILL)
        assert tokens([await stream.collect()]) == tokens(local.generate([long_prompt], GREEDY, adapter="dora"))

    async def disturb_streams(engine: AsyncLLM, scene: dict[int, tuple[int, signal.Signals]]) -> None:
        victims: set[int] = set()

        def disturb(num_deltas: int) -> None:
            if num_deltas in scene:
                first_layer, how = scene[num_deltas]
                victim = next(worker for worker in stages(engine) if worker.layers[0] == first_layer)
                os.kill(victim.pid, how)
                victims.add(victim.pid)

        assert await read_all(engine, disturb) == expected
        assert len(victims) == len(scene)
        assert not victims & {worker.pid for worker in engine.workers}

    async def scenario() -> None:
        engine = open_engine()
        num_free_blocks = engine.num_free_blocks
        await kill_during_prompt(engine)
        # The first is replaced by a spare, the second by whatever there is by then.
        await wait_for_spare(engine)
        await disturb_streams(engine, {60: (0, signal.SIGKILL), 300: (2, signal.SIGSTOP)})
        # Each was replaced, and computed again what its own layers had lost.
        assert all(worker.work is not None and worker.work.num_replayed_tokens > 0 for worker in stages(engine))
        assert engine.num_free_blocks == num_free_blocks
        assert engine.num_unfinished_requests == 0
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 4 * DEADLINE_SECONDS))


def test_r108_a_worker_that_computes_for_long_is_not_taken_for_dead(cluster: None, tmp_path: Path) -> None:
    """A prompt keeps a worker busy for three times as long as it may give no sign of life."""
    base = make_llama(tmp_path / "base", hidden_size=256, num_attention_heads=16, max_position_embeddings=32_768)
    long_prompt = {"prompt_token_ids": [token % 251 for token in range(14_000)]}
    first_token = SamplingParams(max_tokens=1, temperature=0)
    options: dict[str, Any] = {"kv_cache_bytes": 1 << 28, "max_num_batched_tokens": 32_768}
    begun = time.perf_counter()
    expected = tokens(LLM(base, **options).generate([long_prompt], first_token))
    patience_seconds = (time.perf_counter() - begun) / 3
    llm = LLM(base, workers=1, worker_timeout_seconds=patience_seconds, **options)
    assert tokens(llm.generate([long_prompt], first_token)) == expected
    work = next(worker.work for worker in llm.workers if worker.work is not None)
    assert work.compute_seconds > patience_seconds
    assert llm.num_lost_workers == 0
    llm.shutdown()


def test_a_killed_rank_is_replaced_with_its_stage(
    cluster: None, base: Path, adapters: dict[str, Path], local: LLM
) -> None:
    llm = LLM(base, adapters={name: adapters[name] for name in NAMES}, tensor_parallel=2, **OPTIONS)
    assert_same_logits(llm, local, NAMES)
    first = {worker.pid: worker for worker in llm.workers if worker.state == "running"}
    assert [worker.rank for worker in first.values()] == [0, 1]
    os.kill(list(first)[1], signal.SIGKILL)
    assert tokens(answers(llm, NAMES)) == tokens(answers(local, NAMES))
    assert not first.keys() & {worker.pid for worker in llm.workers}
    llm.shutdown()


def assert_workers_are_seen(url: str, http: httpx.Client) -> None:
    """By Prometheus and on the command line; the first rank has done the steps of an answer of four tokens."""
    families = {family.name: family for family in text_string_to_metric_families(http.get(f"{url}/metrics").text)}
    up = [sample.labels for sample in families["graft_worker_up"].samples]
    assert [(labels["layers"], labels["rank"]) for labels in up] == [("0-3", "0"), ("0-3", "1")]
    for name in ("steps", "compute_seconds", "idle_seconds", "hop_bytes", "adapter_bytes"):
        [sample] = families[f"graft_worker_{name}"].samples
        assert sample.labels == {"worker": up[0]["worker"]}
        assert sample.value >= (4 if name == "steps" else 1e-9), name
    assert families["graft_workers_lost"].samples[0].value == 0
    shown = CliRunner().invoke(app, ["cluster", "status", "--url", url], env={"COLUMNS": "200", "TERM": "dumb"})
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0][:4] == ["worker", "node", "process", "state"]
    assert [row[3:7] for row in rows[1:3]] == [["running", "0-3", "0", "plain"], ["running", "0-3", "1", "plain"]]
    assert shown.stdout.endswith("0 workers lost so far\n")


@pytest.fixture
def served(base: Path, adapters: dict[str, Path]) -> list[str]:
    return [str(base), "--adapter", f"plain={adapters['plain']}", "--port", "0", "--tensor-parallel", "2"]


def test_graft_serve_starts_ray_on_loopback_and_takes_it_along(served: list[str]) -> None:
    with graft_process("serve", *served) as graft, httpx.Client(timeout=DEADLINE_SECONDS) as http:
        graft.read_until("/v1\n")
        url = re.findall(r"http://127\.0\.0\.1:\d+", graft.output)[0]
        body = {"model": "plain", "prompt": "x", "max_tokens": 4, "temperature": 0}
        assert http.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        assert http.post(f"{url}/v1/completions", json={**body, "model": "other"}).status_code == 404
        assert_workers_are_seen(url, http)
        processes = graft.descendants()
        assert any("raylet" in process.name() for process in processes)
        addresses = {
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        graft.interrupt()
        assert graft.wait() == 0
        assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []
