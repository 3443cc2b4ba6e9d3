"""`graft serve`: starting, being told why not, and stopping."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from graftlm.cli import app
from tests.cli.conftest import Files
from tests.cli.graft_process import GraftProcess, graft_process

LONG = {"model": "red", "prompt": "x", "max_tokens": 16000, "ignore_eos": True, "stream": True}


def wait_for_url(graft: GraftProcess) -> str:
    graft.read_until("/v1\n")
    match = re.fullmatch(r"Serving tiny with 2 adapters \(red, blue\) at (http://127\.0\.0\.1:\d+)/v1\n", graft.output)
    assert match is not None, graft.output
    return match[1]


def test_ctrl_c_lets_running_requests_finish_and_exits_with_0(files: Files) -> None:
    with graft_process("serve", *files.arguments, "--port", "0") as graft, httpx.Client(timeout=60) as http:
        url = wait_for_url(graft)
        assert {card["id"] for card in http.get(f"{url}/v1/models").json()["data"]} == {"tiny", "red", "blue"}
        begun = threading.Event()

        def read() -> str:
            body = {**LONG, "max_tokens": 100}
            with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
                lines = []
                for line in reply.iter_lines():
                    lines.append(line)
                    begun.set()
                return "".join(lines)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            assert begun.wait(60)
            graft.interrupt()
            assert reading.result().endswith("data: [DONE]")
        assert graft.wait() == 0
        assert graft.errors() == ""


def test_a_second_ctrl_c_exits_at_once(files: Files) -> None:
    arguments = ["serve", *files.arguments, "--port", "0", "--drain-seconds", "600"]
    with graft_process(*arguments) as graft, httpx.Client(timeout=60) as http:
        url = wait_for_url(graft)
        with http.stream("POST", f"{url}/v1/completions", json=LONG) as reply:
            lines = reply.iter_lines()
            next(lines)
            graft.interrupt()
            # It was heard once the server is not ready any more; the running request goes on.
            while http.get(f"{url}/ready").status_code == 200:
                next(lines)
            assert http.get(f"{url}/health").status_code == 200
            graft.interrupt()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert graft.wait() == 130
        assert "Traceback" not in graft.errors()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "MODEL"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
        (["BASE", "--demo"], "--demo"),
        (["BASE", "--adapter", "red"], "NAME=PATH"),
        (["BASE", "--adapter", "red=/nowhere/at/all"], "/nowhere/at/all"),
        (["BASE", "--adapter", "a b=RED"], "a b"),
        (["BASE", "--enable-adapter-loading"], "--adapter-root DIR or --adapter-hub-id"),
        (["BASE", "--enable-adapter-loading", "--adapter-root", "/nowhere/at/all"], "/nowhere/at/all"),
        (["BASE", "--host", "192.0.2.1"], "192.0.2.1"),
        (["BASE", "--max-model-len", "1000000"], "1000000"),
        # R103: what is missing is the device, not a package.
        (["BASE", "--device", "cuda:99"], "cuda:99"),
        (["BASE", "--device", "cuda:99", "--quantization", "nf4"], "device='cpu'"),
        (["BASE", "--device", "mps"], "mps"),
        (["BASE", "--device", "toaster"], "toaster"),
    ],
    ids=" ".join,
)
def test_why_not_is_one_line_on_stderr(files: Files, arguments: list[str], words: str) -> None:
    real = [argument.replace("BASE", str(files.base)).replace("RED", str(files.red)) for argument in arguments]
    result = CliRunner().invoke(app, ["serve", *real, "--port", "0"])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("graft: ")
    assert words in line


def test_a_port_in_use_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "no model"), "--port", str(port)])
    assert result.exit_code == 2
    assert f"127.0.0.1:{port}" in result.stderr
    assert "in use" in result.stderr
