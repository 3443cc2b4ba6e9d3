"""What a file holds, as a digest. Reading gigabytes takes seconds, so digests are remembered from one start to the
next."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from graftlm.checkpoint.atomic_file import partial_file, publish
from graftlm.checkpoint.file_identity import FileIdentity

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

    A remembered digest counts while the file's identity is what it was when it was read. Digests of files that were
    changed in the last two seconds are not remembered: another change might not move the clock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def digest(self, path: Path, identity: FileIdentity) -> str:
        """
        Args:
            identity: of the file whose digest is wanted.

        Raises:
            OSError: the file cannot be read, or has become another.
        """
        record = self._folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
        remembered = _read(record, identity)
        digest = remembered or file_digest(path)
        if FileIdentity.of(path) != identity:
            raise OSError(f"{path} has changed since it was opened")
        if not remembered and max(identity.mtime_ns, identity.ctime_ns) < time.time_ns() - SETTLED_SECONDS * 1e9:
            # Where it cannot be remembered the file is read at every start.
            with suppress(OSError):
                self._remember(record, {"file": asdict(identity), "sha256": digest})
        return digest

    def _remember(self, record: Path, content: Mapping[str, object]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with partial_file(self._folder) as partial:
            partial.write_text(json.dumps(content), encoding="utf-8")
            publish(partial, record)


def _read(record: Path, identity: FileIdentity) -> str | None:
    """The digest in a record of the same file; None where there is none or it cannot be read."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("file") != asdict(identity):
        return None
    digest = content.get("sha256")
    return digest if isinstance(digest, str) else None
