"""RESULTS.md: a section for each script that writes there, with what the run was made on."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "RESULTS.md"
TITLE = (
    "# Results\n\nEach section is one run of the script it names, on an otherwise quiet machine unless it says so.\n"
)


def conditions() -> str:
    """Commit, date and hardware in general terms."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with local changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    isa = torch.backends.cpu.get_cpu_capability()
    return (
        f"commit {commit}{changed}, {datetime.date.today().isoformat()}, {platform.machine()} with "
        f"{len(os.sched_getaffinity(0))} cores ({isa}), torch {torch.__version__}"
    )


def write_section(heading: str, body: str, path: Path = RESULTS) -> None:
    """Put a section in place of the one of the same heading, or at the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else TITLE
    section = f"## {heading}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: f"{section}\n", text)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
