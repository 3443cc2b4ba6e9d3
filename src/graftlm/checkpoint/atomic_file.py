"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_SUFFIX = ".partial"


@contextmanager
def partial_file(folder: Path) -> Iterator[Path]:
    """An empty file in `folder` to write to and then to `publish`; else it is removed. Each writer has its own.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    handle, name = tempfile.mkstemp(dir=folder, suffix=PARTIAL_SUFFIX)
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(partial: Path, path: Path) -> None:
    """Give a file that is complete its name; whatever had it before is replaced.

    Raises:
        OSError
    """
    # Without this a crash of the machine may leave the name and not the bytes.
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)
