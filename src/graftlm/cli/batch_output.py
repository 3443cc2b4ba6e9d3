"""A file to which finished rows are appended, one JSON object a line, so that a run that was cut short can go on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftlm.errors import ConfigurationError


class BatchOutput:
    """Appends rows, each with one write; close it with `close`. One process at a time.

    Raises:
        ConfigurationError: the file cannot be written, holds something else, or is another run's.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as cause:
            raise ConfigurationError("the file cannot be written", got=f"{path}: {cause.strerror}") from cause
        try:
            self.finished = self._take(path)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one row."""
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        written = 0
        # A full disk takes a part; the rest fails, and is cut off when the run goes on.
        while written < len(line):
            written += os.write(self._file, line[written:])

    def close(self) -> None:
        os.close(self._file)

    def _take(self, path: Path) -> frozenset[str]:
        """Lock the file, cut off a row that a crash left half written, and read the ids of the others."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise ConfigurationError("another run is writing to this file", got=path) from cause
        row_ids = set()
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    row_ids.add(str(row.get("custom_id", row.get("id"))))
                except (ValueError, AttributeError) as cause:
                    raise ConfigurationError(
                        f"{path}:{number}: this is no row of a batch's output", do="choose another file"
                    ) from cause
                whole += len(line)
        os.ftruncate(self._file, whole)
        return frozenset(row_ids)
