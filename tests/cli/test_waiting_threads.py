"""Threads that wait for each other hardly spin: beside another busy process they would take whole time slices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def spin_count(arguments: list[str], **variables: str) -> str:
    """What the OpenMP runtime of a `graft` process was told, by its own account."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-m", "graftlm.cli", *arguments],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    [found] = set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr))
    return str(found)


def test_processes_that_compute_are_started_with_a_low_spin_count(llama: Path, tmp_path: Path) -> None:
    assert spin_count(["generate", str(llama), "--prompt", "hello", "--max-tokens", "1"]) == "2000"
    # The model is not there; the runtime is loaded before that is noticed.
    assert spin_count(["serve", str(tmp_path / "missing")]) == "2000"


def test_a_spin_count_that_is_set_stays(llama: Path) -> None:
    assert spin_count(["generate", str(llama), "--prompt", "hello", "--max-tokens", "1"], GOMP_SPINCOUNT="77") == "77"
