"""Signs of life: each worker counts in a thread of its own, at the coordinator's, whatever it computes meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

# A worker's with a coordinator that does not answer.
PATIENCE_SECONDS = 30.0


class Heart:
    """Beats in this process until it ends, or until nobody listens any more.

    Args:
        name: which worker this is. place: "host:port" of the coordinator's store.
    """

    def __init__(self, name: str, place: str, interval_seconds: float) -> None:
        self._name = name
        self._place = place
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="graft-heart", daemon=True).start()

    def _beat(self) -> None:
        host, _, port = self._place.rpartition(":")
        try:
            store = TCPStore(host, int(port), None, False, timedelta(seconds=PATIENCE_SECONDS))
            while not self._stop.wait(self._interval_seconds):
                store.add(self._name, 1)
        except RuntimeError:
            # The coordinator is gone, and this process will be ended.
            return


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
