"""The file of API keys, read again whenever it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from graftlm.errors import ConfigurationError
from graftlm.server.api_keys import ApiKey, parse_keys

logger = logging.getLogger(__name__)


class KeyFile:
    """The keys of a file as they are now. A file that has become unreadable leaves the keys as they were, and a log
    line says so; to revoke all keys, leave it empty.

    Raises:
        ConfigurationError: it cannot be read to begin with.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._version = self._find_version()
        self._keys = self._read()

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        version = self._find_version()
        if version != self._version:
            # Noted first: a file that is wrong is complained of once.
            self._version = version
            try:
                self._keys = self._read()
                logger.info("read the API keys again: %d", len(self._keys))
            except ConfigurationError as error:
                logger.error("the API keys stay as they were: %s", error)
        return self._keys

    def _find_version(self) -> tuple[int, ...] | None:
        """What changes with the file's content; None when there is no file."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> tuple[ApiKey, ...]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigurationError("the file of API keys cannot be read", got=str(cause)) from cause
        return parse_keys(text)
