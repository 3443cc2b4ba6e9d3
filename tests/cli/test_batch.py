"""`graft generate -f rows.jsonl -o answers.jsonl`: a batch that can be cut short and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from graftlm import LLM, SamplingParams
from graftlm.cli import app
from tests.cli.conftest import Files
from tests.cli.graft_process import graft_process

GREEDY = ["--temperature", "0", "--max-tokens", "8"]
CHAT = [{"role": "user", "content": "hello"}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(files: Files, rows: Path, answers: Path, *more: str) -> Result:
    arguments = ["generate", *files.arguments, *GREEDY, "-f", str(rows), "-o", str(answers), *more]
    return CliRunner().invoke(app, arguments)


def test_rows_are_answered_by_the_adapters_they_name_and_a_run_goes_on_where_one_ended(
    files: Files, tmp_path: Path
) -> None:
    names = [None, "red", "blue"]
    rows = [{"id": index, "prompt": f"hello {index}", "adapter": names[index % 3]} for index in range(12)]
    source, answers = write(tmp_path / "rows.jsonl", rows), tmp_path / "answers.jsonl"
    first = run(files, source, answers)
    assert (first.exit_code, first.stdout) == (0, "")
    assert "12 answered, 0 refused" in first.stderr
    by_id = {row["id"]: row for row in read(answers)}
    assert set(by_id) == {str(index) for index in range(12)}

    llm = LLM(files.base, name="tiny", adapters={"red": files.red, "blue": files.blue}, kv_cache_bytes=16 << 20)
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [row["prompt"] for row in rows]
    outputs = llm.generate(prompts, params, adapter=[row["adapter"] for row in rows])
    llm.shutdown()
    for index, output in enumerate(outputs):
        row = by_id[str(index)]
        assert (row["text"], row["model"]) == (output.outputs[0].text, names[index % 3] or "tiny")

    lines = answers.read_text().splitlines(keepends=True)
    kept = "".join(lines[:7])
    answers.write_text(kept + lines[7][:20])
    again = run(files, source, answers)
    assert "5 answered, 0 refused, 7 were there already" in again.stderr
    assert answers.read_text().startswith(kept)
    assert {row["id"]: row["text"] for row in read(answers)} == {key: row["text"] for key, row in by_id.items()}
    done = answers.read_text()
    assert "0 answered" in run(files, source, answers).stderr
    assert answers.read_text() == done


def test_openais_batch_format_is_answered_in_kind(files: Files, tmp_path: Path) -> None:
    def row(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    source = write(
        tmp_path / "rows.jsonl",
        [
            row("chat", "/v1/chat/completions", model="red", messages=CHAT, max_completion_tokens=3),
            row("text", "/v1/completions", model="blue", prompt="hello", n=2),
            row("response", "/v1/responses", model="tiny", input="hello"),
            row("wrong", "/v1/completions", model="nope", prompt="hello"),
            row("worse", "/v1/completions", model="red", prompt="hello", top_p=3),
            {"id": "plain", "messages": CHAT, "model": "red"},
            {"prompt": "hello", "n": 2},
            {"id": "refused", "prompt": ""},
        ],
    )
    answers = tmp_path / "answers.jsonl"
    result = run(files, source, answers)
    assert (result.exit_code, "5 answered, 3 refused" in result.stderr) == (0, True), result.stderr
    by_id = {answer.get("custom_id", answer["id"]): answer for answer in read(answers)}
    replies = {key: answer["response"] for key, answer in by_id.items() if "response" in answer}
    assert {key: reply["status_code"] for key, reply in replies.items()} == {
        "chat": 200, "text": 200, "response": 200, "wrong": 404, "worse": 400
    }  # fmt: skip
    assert replies["chat"]["body"]["usage"]["completion_tokens"] == 3
    assert [choice["index"] for choice in replies["text"]["body"]["choices"]] == [0, 1]
    assert replies["response"]["body"]["usage"]["output_tokens"] == 8
    assert replies["worse"]["body"]["error"]["param"] == "top_p"
    assert by_id["plain"]["model"] == "red"
    assert by_id["line-7"]["texts"] == [by_id["line-7"]["text"]] * 2
    assert by_id["refused"]["error"]["param"] == "prompt"


def test_ctrl_c_keeps_what_was_answered(files: Files, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 16000, "ignore_eos": True}]
    source, answers = write(tmp_path / "rows.jsonl", rows), tmp_path / "answers.jsonl"
    arguments = ["generate", *files.arguments, "-f", str(source), "-o", str(answers)]
    with graft_process(*arguments) as graft:
        graft.wait_for_line_in(answers)
        graft.interrupt()
        assert graft.wait() == 130
        errors = graft.errors()
    assert "stopped; 1 answered" in errors
    assert "Traceback" not in errors
    assert [row["id"] for row in read(answers)] == ["line-1"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["nonsense"], "rows.jsonl:1: this is not JSON"),
        (["[]"], "rows.jsonl:1: a row is a JSON object"),
        (['{"prompt": "a"}', '{"a": 1}'], "rows.jsonl:2: a row has either prompt or messages"),
        (['{"id": "a", "prompt": "a"}', '{"id": "a", "prompt": "b"}'], "rows.jsonl:2: the id 'a'"),
        (['{"prompt": "a", "adapter": "red", "model": "red"}'], "either model or adapter"),
        (['{"prompt": "a", "stream": true}'], "no stream"),
        (['{"custom_id": "a", "method": "GET", "url": "/v1/models", "body": {}}'], "a batch row has custom_id"),
    ],
)
def test_what_is_no_row_is_told_with_its_line_before_a_model_is_loaded(
    tmp_path: Path, rows: list[str], words: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(rows))
    answers = tmp_path / "answers.jsonl"
    result = CliRunner().invoke(app, ["generate", "/no/model", "-f", str(source), "-o", str(answers)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert not answers.exists()


def test_an_output_that_is_of_something_else_is_left_alone(files: Files, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    for content, words in (("not a row\n", "answers.jsonl:1"), ('{"id": "other"}\n', "'other'")):
        answers = tmp_path / "answers.jsonl"
        answers.write_text(content)
        result = run(files, source, answers)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
        assert answers.read_text() == content


@pytest.mark.parametrize(
    "arguments",
    [
        ["-f", "ROWS"],
        ["-o", "OUT"],
        ["-f", "ROWS", "-o", "OUT", "--prompt", "x"],
        ["-f", "ROWS", "-o", "OUT", "--use", "a", "--use", "b"],
        ["-f", "/no/rows", "-o", "OUT"],
        ["-f", "ROWS", "-o", "/no/folder/out"],
        ["-f", "ROWS", "-o", "OUT", "--top-p", "3"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_one_line_on_stderr(tmp_path: Path, arguments: list[str]) -> None:
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    real = [argument.replace("ROWS", str(source)).replace("OUT", str(tmp_path / "out")) for argument in arguments]
    result = CliRunner().invoke(app, ["generate", "/no/model", *real])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("graft: ")
