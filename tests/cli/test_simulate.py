"""`graft simulate`, and the costs that `graft bench` measures for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from graftlm.cli import app
from graftlm.cli.costs_file import read_costs, write_costs
from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts
from graftlm.simulation.policies import POLICIES
from tests.tiny import make_llama

FAST = ["--workers", "2,4", "--zipf", "1", "--seconds", "4"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *FAST, *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_every_policy_is_predicted_for_every_size(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    result = simulate("--json", str(figures), "--plot", str(picture), "--mean-seconds-between-crashes", "5")
    assert result.exit_code == 0, result.output
    content = json.loads(figures.read_text())
    assert [(run["workers"], run["policy"]) for run in content["runs"]] == [
        (workers, name) for workers in (2, 4) for name in POLICIES
    ]
    assert all(0 <= run["attainment"] <= 1 and run["wait_p50"] <= run["wait_p95"] for run in content["runs"])
    assert "predicted" in content["kind"]
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line]
    assert [row[2] for row in rows] == [*POLICIES, *POLICIES]
    assert "not measured" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.json"
    simulate("--json", str(again), "--mean-seconds-between-crashes", "5")
    assert json.loads(again.read_text()) == content


def test_dearer_steps_make_longer_waits(tmp_path: Path) -> None:
    costs, figures = tmp_path / "costs.json", tmp_path / "figures.json"
    write_costs(StepCosts(step_seconds=0.5), costs, measured="a slow machine")
    result = simulate("--costs", str(costs), "--json", str(figures))
    assert "a slow machine" in result.stdout
    assert all(run["wait_p95"] > 0.2 for run in json.loads(figures.read_text())["runs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "many"], "--workers cannot be read"),
        (["--workers", "0"], "num_workers"),
        (["--policies", "mine"], "no routing policy"),
        (["--zipf", "-1"], "zipf"),
        (["--plot", "picture.txt"], "no kind of picture"),
        (["--json", "nowhere/figures.json"], "does not exist"),
        (["--costs", "nowhere.json"], "cannot be read"),
    ],
)
def test_what_has_no_meaning_is_refused(arguments: list[str], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("content", ["[]", '{"kind": "other"}', '{"kind": "graft step costs", "costs": {}}'])
def test_another_file_is_no_costs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="no file of step costs"):
        read_costs(path)


def test_bench_measures_what_a_step_takes(tmp_path: Path) -> None:
    base, path = make_llama(tmp_path / "base"), tmp_path / "costs.json"
    options = ["--requests", "1", "--prompt-tokens", "16", "--output-tokens", "2", "--repeats", "1"]
    adapters = ["--random-adapters", "4", "--kv-cache-bytes", "1MiB"]
    refused = CliRunner().invoke(app, ["bench", str(base), *options, "--costs", str(path)])
    assert refused.exit_code == 2
    assert "--random-adapters" in refused.stderr
    result = CliRunner().invoke(app, ["bench", str(base), *options, *adapters, "--costs", str(path)])
    assert result.exit_code == 0, result.output
    costs, measured = read_costs(path)
    assert costs.step(rows=16, adapters=4) > costs.step(rows=1)
    assert asdict(costs)["load_byte_seconds"] > 0
    assert measured.startswith("base, float32")
