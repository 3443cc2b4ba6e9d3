"""Commands that ask a running server: `graft adapters`, `graft chat URL`, `graft generate URL`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from graftlm import AsyncLLM
from graftlm.cli import app
from tests.cli.conftest import Files
from tests.server.live_server import LiveServer, serving

WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture(scope="module")
def live(files: Files) -> Iterator[LiveServer]:
    llm = AsyncLLM(files.base, name="tiny", adapters={"red": files.red}, kv_cache_bytes=16 << 20)
    with serving(llm, adapter_roots=[files.base.parent]) as running:
        yield running


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin, env=WIDE)


def test_adapters_are_listed_described_loaded_and_unloaded(live: LiveServer) -> None:
    url = ["--url", live.url]

    def listed() -> list[list[str]]:
        return [line.split() for line in run("adapters", "ls", *url).stdout.splitlines()]

    assert [row[:3] for row in listed()] == [
        ["name", "weights", "method"],
        ["tiny", "base"],
        ["red", "resident", "LoRA"],
    ]
    loaded = run("adapters", "load", "azure", "blue", *url)
    assert (loaded.exit_code, "azure: LoRA" in loaded.stdout) == (0, True), loaded.output
    assert listed()[-1][:2] == ["azure", "resident"]
    shown = run("adapters", "info", "azure", *url, "--json")
    assert json.loads(shown.stdout)["ranks"] == [8]
    assert "parent         tiny" in run("adapters", "info", "azure", *url).stdout
    assert run("adapters", "load", "azure", "blue", "--replace", *url).exit_code == 0
    assert run("adapters", "unload", "azure", *url).stdout == "azure: unloaded\n"
    assert len(listed()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "nope"], "nope"),
        (["unload", "nope"], "nope"),
        (["load", "red", "blue"], "red"),
        (["load", "new", "/etc"], "outside the adapter roots"),
        (["ls", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["ls", "--url", "ftp://x"], "not the URL of a server"),
    ],
    ids=" ".join,
)
def test_what_the_server_refuses_is_one_line_on_stderr(live: LiveServer, arguments: list[str], words: str) -> None:
    result = run("adapters", *arguments, *([] if "--url" in arguments else ["--url", live.url]))
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("graft: ")
    assert words in line


def test_a_conversation_with_a_server_is_that_with_the_model(live: LiveServer, files: Files) -> None:
    lines = "hello\n/adapter red\nmore\n/adapter\n/adapter nope\n/reset\n/system Be brief.\nagain\n"
    greedy = ["--temperature", "0", "--max-tokens", "6"]
    remote = run("chat", live.url, *greedy, stdin=lines)
    local = run(
        "chat", str(files.base), "--name", "tiny", "--adapter", f"red={files.red}", "--kv-cache-bytes", "1MiB", *greedy,
        stdin=lines,
    )  # fmt: skip
    assert remote.exit_code == 0, remote.output
    assert remote.stdout == local.stdout
    assert "no model answers to this name" in remote.stderr
    assert run("chat", live.url, "--use", "red", stdin="").stdout.startswith("/help lists the commands.\n\nred> ")


@pytest.mark.parametrize("option", [["--max-num-seqs", "3"], ["--adapter", "a=b"], ["--deterministic"]])
def test_a_servers_engine_has_its_own_options(live: LiveServer, option: list[str]) -> None:
    result = run("chat", live.url, *option)
    assert result.exit_code == 2
    assert option[0].removeprefix("--") in result.stderr


def test_a_file_can_be_answered_by_a_server(live: LiveServer, tmp_path: Path) -> None:
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text('{"prompt": "hello", "model": "red"}\n{"prompt": "hello"}\n')
    result = run(
        "generate", f"{live.url}/v1", "-f", str(rows), "-o", str(answers), "--temperature", "0", "--max-tokens", "8"
    )
    assert result.exit_code == 0, result.output
    texts = {row["model"]: row["text"] for row in map(json.loads, answers.read_text().splitlines())}
    assert texts == {name: live.text(model=name, prompt="hello") for name in ("red", "tiny")}
    assert run("generate", live.url, "--prompt", "hello").exit_code == 2
