"""Whether a file is still the one it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """What changes when a file is replaced, written to or cut. A tool can set the mtime back, but not the ctime."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """
        Raises:
            OSError: there is no such file.
        """
        status = path.stat()
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )
