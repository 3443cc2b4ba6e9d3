"""A lock for each name that somebody is busy with."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class NameLocks:
    """Work on one name is done one after the other, work on different names at the same time."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._users: Counter[str] = Counter()
        self._guard = threading.Lock()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait for whoever is busy with the name."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
            self._users[name] += 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name], self._locks[name]
