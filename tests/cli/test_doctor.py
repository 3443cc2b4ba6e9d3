"""`graft doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from typer.testing import CliRunner

from graftlm.cli import app


def found(output: str) -> dict[str, str]:
    """What is said under each name."""
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in output.splitlines())}


def test_what_there_is_is_told_and_the_exit_code_is_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "not" / "there"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stderr
    said = found(result.stdout)
    assert said["torch"] == torch.__version__
    assert said["ray"] == ray.__version__
    assert said["threads"].split(",")[0] == str(torch.get_num_threads())
    assert torch.backends.cpu.get_cpu_capability() in said["processor"]
    assert "in use" in said["kernels"]
    assert said["cache"].startswith(str(tmp_path / "not" / "there"))
    assert "GiB free" in said["memory"]


def test_what_is_in_the_way_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "file"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("graft: cache: ")
    assert "GRAFT_CACHE" in line
