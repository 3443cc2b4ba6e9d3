"""`graft serve` in a process of its own, for benchmarks that ask over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

STOP_SECONDS = 60


class Served:
    """A server that accepts connections. `url` has no trailing slash."""

    def __init__(self, arguments: Sequence[str], log: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graftlm.cli", "serve", *arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # A shell that starts this in the background makes it deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r" at (http://\S+)/v1$", line.rstrip())
        if found is None:
            raise RuntimeError(f"the server did not start; it said: {line!r}")
        self.url = found[1]

    @property
    def resident_bytes(self) -> int:
        """Memory of the process as the kernel counts it."""
        size: int = psutil.Process(self._process.pid).memory_info().rss
        return size

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """End it as an orchestrator does; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """A server for the length of the block. What it logs is shown if the block fails."""
    with tempfile.TemporaryFile("w+") as log:
        server = Served(arguments, log.fileno())
        try:
            yield server
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-20_000:])
            raise
        finally:
            server.kill()
