"""`graft bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from matplotlib.image import imread
from typer.testing import CliRunner

from graftlm.cli import app
from graftlm.workload import FIGURES
from tests.cli.conftest import Files

SMALL = ["--prompt-tokens", "6", "--output-tokens", "4", "--repeats", "2", "--kv-cache-bytes", "16MiB"]


def bench(files: Files, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", str(files.base), *SMALL, *arguments])


def test_figures_of_each_batch_size_are_shown_written_and_drawn(files: Files, tmp_path: Path) -> None:
    result = bench(
        files, "--batch-sizes", "1,3", "--adapter", f"red={files.red}", "--random-adapters", "1", "--rank", "2",
        "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 request  3 requests" in result.stdout
    assert "GFLOP/s" in result.stdout
    assert "2 adapters" in result.stdout
    for figure in FIGURES:
        [line] = [line for line in result.stdout.splitlines() if line.startswith(figure.label + " ")]
        assert len(line.removeprefix(figure.label).replace(" ms", "").split()) == 2
    written = json.loads((tmp_path / "out.json").read_text())
    assert [each["workload"]["num_requests"] for each in written["workloads"]] == [1, 3]
    assert written["workloads"][0]["workload"]["adapters"] == ["red", "random-0"]
    for each in written["workloads"]:
        assert len(each["runs"]) == 2
        for figure in FIGURES:
            low, high = sorted(run[figure.name] for run in each["runs"])
            assert 0 < low <= each["medians"][figure.name] <= high
    assert written["dtype"] == "float32"
    assert imread(tmp_path / "out.png").ndim == 3


def test_the_base_is_measured_without_adapters_and_in_the_mode_asked_for(files: Files, tmp_path: Path) -> None:
    result = bench(
        files, "--requests", "2", "--dtype", "bfloat16", "--deterministic", "--json", str(tmp_path / "out.json")
    )
    assert result.exit_code == 0, result.output
    assert "no adapters" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert "deterministic" in written["kernels"]
    assert written["workloads"][0]["workload"]["num_requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "2", "--batch-sizes", "1"], "--batch-sizes stands in place of --requests"),
        (["--batch-sizes", "1,x"], "--batch-sizes cannot be read; got: '1,x'; allowed: numbers with commas"),
        (["--batch-sizes", "0"], "num_requests must be a positive integer; got: 0"),
        (["--prompt-tokens", "0"], "prompt_tokens must be a positive integer; got: 0"),
        (["--random-adapters", "1", "--rank", "0"], "rank must be a positive integer; got: 0"),
        (["--json", "no/such/folder/out.json"], "the folder to write into does not exist; got: no/such/folder"),
        (["--plot", "out.nonsense"], "this is no kind of picture that can be drawn; got: out.nonsense"),
        (["--dtype", "float8"], "dtype is not one Graft computes in; got: float8"),
        (["--prompt-tokens", "20000"], "context"),
    ],
)
def test_what_is_wrong_is_one_line(files: Files, arguments: list[str], said: str) -> None:
    result = bench(files, *arguments)
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("graft: ")]
    assert said in line


def test_a_random_adapter_does_not_take_a_given_name(files: Files) -> None:
    result = bench(files, "--adapter", f"random-0={files.red}", "--random-adapters", "1")
    assert result.exit_code == 2
    assert "a random adapter has this name; got: random-0" in result.stderr
