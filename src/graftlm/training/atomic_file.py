"""Files that are replaced as a whole: a reader, or a run that died, finds the old content or the new."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path` and put it in its place. If it fails, `path` is untouched.

    Raises:
        OSError: as `write` does, when the disk is full, say.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
