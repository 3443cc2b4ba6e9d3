"""Uploaded files on disk, by id."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import ObjectNotFound
from graftlm.server.fine_tuning.ownership import Owns, anybody

PURPOSE = "fine-tune"
_META = "file.json"
# What the training reads a file as follows from its name; anything else is taken for JSON Lines.
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What was uploaded. created_at: seconds since 1970. owner: the tenant's name; None without API keys."""

    id: str
    filename: str
    num_bytes: int
    created_at: int
    owner: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": PURPOSE,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """A folder with a folder for each file. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, filename: str, content: bytes, *, owner: str | None) -> StoredFile:
        """Keep a file; it is there as a whole or not at all."""
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            filename=filename,
            num_bytes=len(content),
            created_at=int(time.time()),
            owner=owner,
        )
        partial = self._folder / f".{file.id}"
        partial.mkdir()
        (partial / _content_name(file)).write_bytes(content)
        (partial / _META).write_text(json.dumps(dataclasses.asdict(file)), encoding="utf-8")
        partial.rename(self._folder / file.id)
        return file

    def newest_first(self, owns: Owns = anybody) -> list[StoredFile]:
        """Files of these owners, the newest first."""
        found = [file for folder in self._folder.glob("file-*") if owns((file := self._read(folder)).owner)]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def get(self, file_id: str, owns: Owns = anybody) -> StoredFile:
        """Raises: ObjectNotFound: there is none, or it is somebody else's."""
        for file in self.newest_first(owns):
            if file.id == file_id:
                return file
        raise ObjectNotFound("no such file", got=repr(file_id)[:100])

    def path(self, file_id: str, owns: Owns = anybody) -> Path:
        """Where its content is.

        Raises:
            ObjectNotFound
        """
        return self._folder / file_id / _content_name(self.get(file_id, owns))

    def delete(self, file_id: str, owns: Owns = anybody) -> None:
        """Raises: ObjectNotFound"""
        shutil.rmtree(self._folder / self.get(file_id, owns).id)

    def _read(self, folder: Path) -> StoredFile:
        return StoredFile(**json.loads((folder / _META).read_text(encoding="utf-8")))


def _content_name(file: StoredFile) -> str:
    suffix = Path(file.filename).suffix
    return f"content{suffix if suffix in _SUFFIXES else _SUFFIXES[0]}"
