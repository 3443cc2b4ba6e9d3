"""`graft train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from graftlm import AsyncLLM
from graftlm.cli import app
from tests.server.live_server import serving
from tests.tiny import make_adapter
from tests.training.peft_loop import completion_rows, write_rows

WIDE = {"COLUMNS": "300", "TERM": "dumb"}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], env=WIDE)
    return result.exit_code, result.output


def test_the_reference_call_writes_a_line_per_step_beside_a_peft_folder(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    start = make_adapter(llama, tmp_path / "start")
    code, output = run(
        llama, "--data", data, "--output", tmp_path / "out", "--name", "tuned", "--rank", 8, "--alpha", 16,
        "--target-modules", "q_proj,v_proj", "--lr", "1e-3", "--schedule", "constant", "--steps", 20,
        "--batch-size", 4, "--no-shuffle", "--max-length", 256, "--dtype", "float32", "--seed", 0,
        "--init-adapter", start,
    )  # fmt: skip
    assert (code, "tuned: written to" in output) == (0, True), output
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line.keys() == {"step", "loss", "tokens", "lr", "grad_norm"} for line in lines)
    assert {line["lr"] for line in lines} == {1e-3}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "metrics.jsonl", "loss.png"
    }  # fmt: skip
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_every_metric_of_every_step(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    code, output = run(
        llama, "--data", data, "--output", tmp_path / "out", "--steps", 3, "--tensorboard", tmp_path / "runs",
        "--eval-fraction", 0.25,
    )  # fmt: skip
    assert code == 0, output
    events = EventAccumulator(str(tmp_path / "runs" / "out"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "grad_norm", "tokens"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert [scalar.value for scalar in scalars] == pytest.approx([line[name] for line in lines], rel=1e-6)
    assert [scalar.step for scalar in events.Scalars("eval_loss")] == [3]


def test_what_is_published_replaces_the_version_served_so_far(llama: Path, tmp_path: Path) -> None:
    """Requests of before go on with what they started with."""
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    digests = []

    def publish(version: str, steps: int) -> None:
        code, output = run(
            llama, "--data", data, "--name", "tuned", "--lr", "2e-2", "--steps", steps,
            "--output", tmp_path / version, "--publish", f"{server.url}/v1",
        )  # fmt: skip
        assert code == 0, output
        digests.append(output.rpartition("as version ")[2].strip())

    asked: dict[str, Any] = {"model": "tuned", "prompt": "the cat", "max_tokens": 400, "temperature": 0}
    with serving(AsyncLLM(llama, name="tiny", kv_cache_bytes=4 << 20), adapter_roots=[tmp_path]) as server:
        publish("one", 2)
        before = server.openai.completions.create(**asked).choices[0].text
        stream = iter(server.openai.completions.create(**asked, stream=True))
        begun = next(stream).choices[0].text
        publish("two", 6)
        after = server.openai.completions.create(**asked).choices[0].text
        assert begun + "".join(chunk.choices[0].text for chunk in stream) == before
        assert after != before
        assert digests[0] != digests[1]


def test_a_name_that_no_adapter_can_have_is_noticed_before_training(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    with serving(AsyncLLM(llama, name="tiny", kv_cache_bytes=4 << 20)) as server:
        code, output = run(
            llama, "--data", data, "--output", tmp_path / "out", "--name", "a/b", "--publish", server.url
        )
    assert (code, "got: 'a/b'" in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_noticed_before_training(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    for url, message in (("http://127.0.0.1:9", "no server answers"), ("localhost", "publish is no address")):
        code, output = run(llama, "--data", data, "--output", tmp_path / "out", "--publish", url)
        assert (code, message in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_a_server_that_refuses_leaves_the_adapter_on_disk(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    with serving(AsyncLLM(llama, name="tiny", kv_cache_bytes=4 << 20)) as server:
        code, output = run(llama, "--data", data, "--output", tmp_path / "out", "--steps", 1, "--publish", server.url)
    assert (code, "does not load out; got: 403" in output) == (2, True), (code, output)
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_job_files_train_side_by_side(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    files: list[object] = []
    for name, rank in (("sql", 2), ("poet", 4)):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'data = "{data}"\noutput = "{tmp_path / name}"\nrank = {rank}\n')
        files += ["--job", file]
    code, output = run(llama, *files, "--steps", 2)
    assert code == 0, output
    ranks = [json.loads((tmp_path / name / "adapter_config.json").read_text())["r"] for name in ("sql", "poet")]
    assert ranks == [2, 4]
    code, output = run(llama, *files, "--output", tmp_path / "one")
    assert (code, "cannot be one for all jobs" in output) == (2, True)


def test_what_has_finished_is_drawn_when_another_job_fails(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    files: list[object] = []
    for name, lr in (("ill", 1e37), ("well", 1e-3)):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'data = "{data}"\noutput = "{tmp_path / name}"\nlr = {lr}\nschedule = "constant"\n')
        files += ["--job", file]
    code, output = run(llama, *files, "--steps", 5)
    assert (code, "ill: loss or gradient" in output, "well: written to" in output) == (2, True, True), output
    assert (tmp_path / "well" / "loss.png").exists()
    assert not (tmp_path / "ill" / "adapter_config.json").exists()


def test_a_dry_run_counts_and_writes_nothing(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 40}, {"text": "abc"}])
    code, output = run(
        llama, "--data", data, "--output", tmp_path / "out", "--rank", 2, "--target-modules", "q_proj",
        "--max-length", 10, "--dry-run",
    )  # fmt: skip
    assert code == 0, output
    for text in ("512 in 2 modules", "2, of them 1 too long", "14, of them 12 learnt", "steps per epoch"):
        assert text in output
    assert not (tmp_path / "out").exists()


def test_shown_documents_have_all_their_tokens(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}, {"text": "unseen"}])
    code, output = run(llama, "--data", data, "--output", tmp_path / "out", "--show", 1)
    assert (code, output.strip()) == (0, "a|b|c|d|</s>|")


def test_shown_documents_have_what_is_learnt_in_green(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setitem(WIDE, "TERM", "xterm")
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "c"}])
    code, output = run(llama, "--data", data, "--output", tmp_path / "out", "--show", 1)
    assert code == 0
    dim, green, bar = "\x1b[2m", "\x1b[1;32m", "\x1b[2;34m|\x1b[0m"
    assert output.strip() == f"{dim}a\x1b[0m{bar}{green}c\x1b[0m{bar}{green}</s>\x1b[0m{bar}"


def test_wrong_data_end_with_one_line_and_exit_code_two(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": ""}])
    code, output = run(llama, "--data", data, "--output", tmp_path / "out")
    assert (code, f"{data}:1: text is not a text" in output) == (2, True)
    code, output = run(llama, "--output", tmp_path / "out")
    assert (code, "needs data" in output) == (2, True)
