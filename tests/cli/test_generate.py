"""`graft generate`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from graftlm import LLM, SamplingParams
from graftlm.cli import app
from tests.cli.conftest import Files

GREEDY = ["--temperature", "0", "--max-tokens", "8"]


def run(files: Files, *arguments: str, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", *files.arguments, *GREEDY, *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def expected(files: Files) -> dict[tuple[str, str], str]:
    """(model, prompt) -> greedy text, from the library."""
    llm = LLM(files.base, name="tiny", adapters={"red": files.red, "blue": files.blue}, kv_cache_bytes=16 << 20)
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = {
        (adapter or "tiny", prompt): llm.generate(prompt, params, adapter=adapter)[0].outputs[0].text
        for adapter in (None, "red", "blue")
        for prompt in ("hello", "bye")
    }
    llm.shutdown()
    assert len(set(texts.values())) == 6
    return texts


def test_every_prompt_goes_to_every_adapter(files: Files, expected: dict[tuple[str, str], str]) -> None:
    answers = records(run(files, "--prompt", "hello", "-p", "bye", "--json"))
    asked = [("red", "hello"), ("blue", "hello"), ("red", "bye"), ("blue", "bye")]
    assert [(answer["model"], answer["prompt"]) for answer in answers] == asked
    assert [answer["text"] for answer in answers] == [expected[pair] for pair in asked]
    assert {answer["finish_reason"] for answer in answers} <= {"stop", "length"}
    assert all(0 < len(answer["token_ids"]) <= 8 for answer in answers)


def test_use_chooses_who_answers(files: Files, expected: dict[tuple[str, str], str]) -> None:
    answers = records(run(files, "--prompt", "hello", "--use", "tiny", "--use", "blue", "--json"))
    assert [(answer["model"], answer["text"]) for answer in answers] == [
        ("tiny", expected["tiny", "hello"]),
        ("blue", expected["blue", "hello"]),
    ]


def test_several_answers_have_headings_and_one_has_none(files: Files, expected: dict[tuple[str, str], str]) -> None:
    one = run(files, "--prompt", "hello", "--use", "red")
    assert one == expected["red", "hello"] + "\n"
    two = run(files, "--prompt", "hello")
    assert two == f"== red\n{expected['red', 'hello']}\n== blue\n{expected['blue', 'hello']}\n"
    assert "== red: bye\n" in run(files, "--prompt", "hello", "--prompt", "bye")


def test_a_prompt_can_be_piped_in(files: Files, expected: dict[tuple[str, str], str]) -> None:
    assert run(files, "--use", "red", stdin="hello\n") == expected["red", "hello"] + "\n"


def test_chat_uses_the_template(files: Files, expected: dict[tuple[str, str], str]) -> None:
    llm = LLM(files.base, name="tiny", adapters={"red": files.red}, kv_cache_bytes=16 << 20)
    messages = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), adapter="red")
    llm.shutdown()
    answer = run(files, "--prompt", "hello", "--use", "red", "--chat")
    assert answer == output.outputs[0].text + "\n" != expected["red", "hello"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "x", "--use", "green"], "green"),
        (["--prompt", "x", "--adapter", "green"], "NAME=PATH"),
        (["--prompt", "x", "--adapter", "green=/nowhere/at/all"], "/nowhere/at/all"),
        (["--prompt", "x", "--top-p", "3"], "top_p"),
        (["--prompt", "x", "--dtype", "int3"], "int3"),
        (["--prompt", "x", "--kv-cache-bytes", "lots"], "lots"),
        (["--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_on_stderr(files: Files, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["generate", *files.arguments, *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("graft: ")
    assert words in line
