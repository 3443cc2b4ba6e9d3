"""What a file holds, as a digest. Reading gigabytes takes seconds, so digests are remembered from one start to the
next."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from graftlm.checkpoint.atomic_file import partial_file, publish

# Clocks of file systems tick in steps of up to two seconds (FAT): a change in the same tick as the last does not show.
SETTLED_SECONDS = 2.0


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal: of the digests in Python's library the fastest where the processor helps, and
    most do (more than 1 GB/s).

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests:
    """Digests of files, remembered in small files in `folder`.

    A remembered digest counts while device, inode, size, mtime and ctime are what they were when the file was read. A
    copy over the file or an edit changes the ctime even where a tool sets the mtime back. Digests of files that were
    changed in the last two seconds are not remembered: another change might not move the clock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def digest(self, path: Path) -> str:
        """
        Raises:
            OSError: the file cannot be read, or is being written to.
        """
        path = path.resolve()
        record = self._folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
        before = _identity(path)
        remembered = _read(record, before)
        if remembered is not None:
            return remembered
        digest = file_digest(path)
        if _identity(path) != before:
            raise OSError(f"{path} changed while it was read")
        if max(before["mtime_ns"], before["ctime_ns"]) < time.time_ns() - SETTLED_SECONDS * 1e9:
            self._folder.mkdir(parents=True, exist_ok=True)
            with partial_file(self._folder) as partial:
                partial.write_text(json.dumps({"file": before, "sha256": digest}), encoding="utf-8")
                publish(partial, record)
        return digest


def _identity(path: Path) -> dict[str, int]:
    status = path.stat()
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _read(record: Path, identity: dict[str, int]) -> str | None:
    """The digest in a record of the same file; None where there is none or it cannot be read."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("file") != identity:
        return None
    digest = content.get("sha256")
    return digest if isinstance(digest, str) else None
