"""Rows of a JSON Lines file, with the lines they stand on, or of a data set, with their numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import TrainingDataError
from graftlm.training.dataset_rows import is_dataset, iterate_dataset

MAX_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    line: int
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a line cannot be learnt from."""

    line: int
    reason: str


def read_rows(path: str | Path) -> tuple[list[Row], list[Problem]]:
    """All rows of a file, and the lines that are none. Empty lines are skipped.

    Raises:
        TrainingDataError: there is no such file, or it is not UTF-8.
        ConfigurationError: as `iterate_dataset`.
    """
    if is_dataset(path):
        return [Row(line=number, content=row) for number, row in enumerate(iterate_dataset(path), start=1)], []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as cause:
        raise TrainingDataError("the data cannot be read", got=f"{path}: {cause}") from cause
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as cause:
            problems.append(Problem(line=number, reason=f"not JSON: {cause}"))
            continue
        if isinstance(content, dict):
            rows.append(Row(line=number, content=content))
        else:
            problems.append(Problem(line=number, reason=f"a {type(content).__name__}, not an object"))
    return rows, problems


def report(path: str | Path, problems: Sequence[Problem]) -> TrainingDataError:
    """The error that lists problems by file and line."""
    ordered = sorted(problems, key=lambda problem: problem.line)
    shown = [f"{path}:{problem.line}: {problem.reason}" for problem in ordered[:MAX_SHOWN]]
    more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
    return TrainingDataError(
        f"{len(problems)} {'row' if len(problems) == 1 else 'rows'} cannot be learnt from",
        got="\n  " + "\n  ".join([*shown, *more]),
        do="mend or remove them",
    )
