"""`graft train`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from graftlm.cli import app
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
        "adapter_config.json", "adapter_model.safetensors", "metrics.jsonl"
    }  # fmt: skip


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


def test_wrong_data_end_with_one_line_and_exit_code_two(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": ""}])
    code, output = run(llama, "--data", data, "--output", tmp_path / "out")
    assert (code, f"{data}:1: text is not a text" in output) == (2, True)
    code, output = run(llama, "--output", tmp_path / "out")
    assert (code, "needs data" in output) == (2, True)
