"""A folder of adapter folders, each of which answers to its name. Reads names only, until one is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from graftlm.adapters.adapter import Adapter
from graftlm.adapters.name import is_name
from graftlm.errors import AdapterUnsupported


def lies_below(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a resolved path, and what lies in it or, for a file, beside it, is below one of the folders once all
    links are followed.

    Args:
        folders: resolved.

    Raises:
        OSError, RuntimeError: it cannot be looked into.
    """
    entries = (path if path.is_dir() else path.parent).iterdir()
    return all(
        any(entry.is_relative_to(folder) for folder in folders)
        for entry in (path, *(entry.resolve() for entry in entries))
    )


class AdapterFolder:
    """The direct children of a folder, links to outside left out. What comes and goes there is seen at once."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    def names(self) -> list[str]:
        """Names of the children, sorted. None of them is opened."""
        with os.scandir(self._path) as entries:
            return sorted(entry.name for entry in entries if is_name(entry.name) and self._is_child(entry))

    def locate(self, name: str) -> Path | None:
        """The resolved path of the child of this name; None when there is none."""
        if not is_name(name):
            return None
        try:
            path = (self._path / name).resolve()
            return path if path.is_relative_to(self._path) and path.is_dir() else None
        except (OSError, RuntimeError):
            return None

    def check_contained(self, path: Path) -> None:
        """Raises AdapterUnsupported: a child's files are links to outside."""
        if not lies_below(path, [self._path]):
            raise AdapterUnsupported("its files are links to outside the adapter folder", do="copy the files there")

    def holds(self, adapter: Adapter) -> bool:
        """Whether an adapter was read from the child that has its name."""
        return adapter.source is not None and adapter.source.parent == (self._path / adapter.name).resolve()

    def _is_child(self, entry: os.DirEntry[str]) -> bool:
        return self.locate(entry.name) is not None if entry.is_symlink() else entry.is_dir()
