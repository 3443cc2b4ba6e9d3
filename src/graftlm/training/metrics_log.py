"""One line of JSON per update."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from graftlm.errors import TrainingFailed
from graftlm.training.atomic_file import write_atomically


class MetricsLog:
    """Appends to a file, so that what was measured is there whatever happens next."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, values: Mapping[str, float]) -> None:
        """Raises: TrainingFailed: the line cannot be written."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as cause:
            raise TrainingFailed("the metrics cannot be written", got=str(cause)[:200]) from cause

    def last(self) -> dict[str, float]:
        """What was appended last; nothing if there is none."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        values: dict[str, float] = json.loads(lines[-1]) if lines else {}
        return values

    def rewind(self, step: int) -> None:
        """Forget updates after `step`: they will be made again."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_atomically(self._path, lambda path: path.write_text("".join(kept), encoding="utf-8"))
