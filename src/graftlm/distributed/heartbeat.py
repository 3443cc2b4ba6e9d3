"""Signs of life: each worker counts in a thread of its own, at the coordinator's, whatever it computes meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

# A worker's with a coordinator that does not answer.
PATIENCE_SECONDS = 30.0


def start_heart(name: str, place: str, interval_seconds: float) -> None:
    """Beat in this process until it ends, or until nobody listens any more.

    Args:
        name: which worker this is. place: "host:port" of the coordinator's store.
    """
    threading.Thread(target=_beat, args=(name, place, interval_seconds), name="graft-heart", daemon=True).start()


def _beat(name: str, place: str, interval_seconds: float) -> None:
    host, _, port = place.rpartition(":")
    # A coordinator that is gone has no more use for this process, which will be ended.
    with contextlib.suppress(RuntimeError):
        store = TCPStore(host, int(port), None, False, timedelta(seconds=PATIENCE_SECONDS))
        while True:
            store.add(name, 1)
            time.sleep(interval_seconds)


class Pulse:
    """How long a worker has been silent, as far as anybody has looked.

    Args:
        store: the coordinator's. name: which worker. interval_seconds: between two looks.
    """

    def __init__(self, store: TCPStore, name: str, interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self._store = store
        self._name = name
        self._beats = 0
        self._num_missed = 0

    def heard(self) -> None:
        """It has answered something, which is a sign of life too."""
        self._num_missed = 0

    def look(self) -> float:
        """Seconds without a beat. Counted in looks, each an interval after the one before, and not by the clock: after
        a pause of the whole machine nobody is dead."""
        beats = self._store.add(self._name, 0)
        self._num_missed = self._num_missed + 1 if beats == self._beats else 0
        self._beats = beats
        return self._num_missed * self.interval_seconds
