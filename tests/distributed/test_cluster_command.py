"""`graft cluster`: machines become a cluster and leave it, and a worker is drained under a running server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from graftlm import LLM, AsyncLLM
from graftlm.cli import app
from tests.cli.graft_process import GraftProcess, graft_process
from tests.distributed.rig import OPTIONS
from tests.parity.oracle import prompt_of
from tests.server.live_server import LiveServer, serving

pytestmark = pytest.mark.long

DEADLINE_SECONDS = 60.0
# Of this machine alone, and to Ray as good as any other address.
ADDRESS = "127.0.0.2"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def free_port(host: str = ADDRESS) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def listening(process: GraftProcess) -> set[str]:
    return {
        connection.laddr.ip
        for descendant in process.descendants()
        for connection in descendant.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def assert_leaves(process: GraftProcess) -> None:
    processes = process.descendants()
    assert any("raylet" in each.name() for each in processes)
    process.interrupt()
    assert process.wait() == 0
    assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []


def test_a_cluster_starts_and_ends_with_its_command_and_hears_this_machine_only() -> None:
    port = free_port("127.0.0.1")
    with graft_process("cluster", "start", "--port", str(port), "--num-cpus", "1") as head:
        head.read_until(f"graft serve MODEL --workers 2 --ray-address 127.0.0.1:{port}\n")
        assert "join" not in head.output
        assert listening(head) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        assert_leaves(head)


def test_a_machine_joins_with_the_command_that_it_is_told_and_leaves(tmp_path: Path) -> None:
    port = str(free_port())
    with graft_process("cluster", "start", "--host", ADDRESS, "--port", port, "--num-cpus", "1") as head:
        head.read_until(f"graft cluster join {ADDRESS}:{port}\n")
        with graft_process("cluster", "join", f"{ADDRESS}:{port}", "--host", ADDRESS, "--num-cpus", "1") as member:
            member.read_until("Ctrl-C takes it out")
            assert_leaves(member)
        assert_leaves(head)
        assert "whoever can join a Ray cluster" in head.errors()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "nowhere"], "this is not the address of a cluster; got: nowhere; allowed: HOST:PORT"),
        (["join", "127.0.0.1:6379"], "a cluster there is of one machine"),
        (["start", "--host", "0.0.0.0"], "others do not find this machine by such an address"),
        (["start", "--host", "198.51.100.7"], "nothing can listen there"),
        (["start", "--object-store-memory", "much"], "this is not a size in bytes"),
        (["drain", "worker-1", "--url", "nowhere"], "this is not the URL of a server"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, words in result.stderr) == (2, True), result.output


def test_a_port_that_is_taken_and_one_where_nobody_is_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        assert "nothing can listen there" in run("start", "--port", taken).stderr
    result = run("join", f"{ADDRESS}:{free_port()}")
    assert (result.exit_code, "no cluster answers there" in result.stderr) == (2, True), result.output


def test_who_has_no_token_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with socket.create_server((ADDRESS, 0)) as listener:
        result = run("join", f"{ADDRESS}:{listener.getsockname()[1]}")
    assert (result.exit_code, "the cluster asks for a token, and there is none here" in result.stderr) == (2, True)


@pytest.fixture
def live(cluster: None, base: Path, adapters: dict[str, Path]) -> Iterator[LiveServer]:
    llm = AsyncLLM(base, adapters={"plain": adapters["plain"]}, workers=2, **OPTIONS)
    with serving(llm) as running:
        yield running


def test_draining_a_worker_under_traffic_costs_no_token(live: LiveServer, local: LLM) -> None:
    """Requests come without a pause from before until after; the worker's process is gone then."""
    prompt = list(prompt_of(20, 7))
    body: dict[str, Any] = {"model": "plain", "prompt": prompt, "max_tokens": 30, "ignore_eos": True}
    expected = live.text(**body)
    drained = Event()

    def ask() -> list[str]:
        texts = []
        while not drained.is_set():
            texts.append(live.text(**body))
        return texts

    workers = live.http.get("/status").json()["engine"]["workers"]
    victim = next(worker for worker in workers if worker["layers"] == [2, 4])
    process = psutil.Process(victim["pid"])
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask) for _ in range(2)]
        try:
            result = run("drain", victim["id"], "--url", live.url)
        finally:
            drained.set()
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"layers 2-3: from {victim['id']} to worker-")
    texts = {text for answer in answers for text in answer.result()}
    assert texts == {expected}
    assert psutil.wait_procs([process], timeout=DEADLINE_SECONDS)[1] == []
    status = live.http.get("/status").json()["engine"]
    assert (status["num_moves"], status["num_lost_workers"]) == (1, 0)
    assert "graft_worker_moves_total 1.0" in live.http.get("/metrics").text
    unknown = run("drain", victim["id"], "--url", live.url)
    assert (unknown.exit_code, "no worker and no node has this id" in unknown.stderr) == (2, True)
    node = run("drain", victim["node"][:12], "--url", live.url)
    assert (node.exit_code, "there is no other node" in node.stderr) == (2, True)
    assert live.text(**body) == expected
