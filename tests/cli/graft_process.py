"""The installed command in a process of its own, read as it prints."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

DEADLINE_SECONDS = 90


class GraftProcess:
    """A running `graft`; `output` is what it has printed on stdout so far."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graftlm.cli", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A shell that starts the tests in the background makes them, and so this process, deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._printed = b""
        self._seen = 0

    @property
    def output(self) -> str:
        return self._printed.decode("utf-8", "replace")

    def read_until(self, text: str) -> None:
        """Read until `text` has been printed after what was waited for last."""
        while (at := self._printed.find(text.encode(), self._seen)) < 0:
            self._read()
        self._seen = at + len(text.encode())

    def read_more(self, num_bytes: int) -> None:
        """Read until this much has been printed after what was waited for last."""
        while len(self._printed) < self._seen + num_bytes:
            self._read()
        self._seen += num_bytes

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C, and again after each second of silence, until `text` has been printed: a signal that comes
        between a prompt and the read behind it is noticed only with the next."""
        self.interrupt()
        for _ in range(DEADLINE_SECONDS):
            if text.encode() in self._printed[self._seen :]:
                break
            if select.select([self._stdout], [], [], 1)[0]:
                self._read()
            else:
                self.interrupt()
        self.read_until(text)

    def _read(self) -> None:
        assert select.select([self._stdout], [], [], DEADLINE_SECONDS)[0], self.output
        piece = os.read(self._stdout.fileno(), 65536)
        assert piece, f"{self.output}\n{self.errors()}"
        self._printed += piece

    def wait_for_line_in(self, path: Path) -> None:
        """Wait until the command has written a line to a file."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (path.exists() and b"\n" in path.read_bytes()):
            assert self._process.poll() is None, self.errors()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def type(self, line: str) -> None:
        self._stdin.write(f"{line}\n".encode())
        self._stdin.flush()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        """End it as a crash does: it hears nothing of it."""
        self._process.kill()
        self._process.wait()

    def has_open(self, path: Path) -> bool:
        """Whether it has this file open now."""
        return any(file.path == str(path) for file in psutil.Process(self._process.pid).open_files())

    def descendants(self) -> list[psutil.Process]:
        """All processes it has started, and theirs."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def errors(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def graft_process(*arguments: str) -> Iterator[GraftProcess]:
    process = GraftProcess(arguments)
    try:
        yield process
    finally:
        process.close()
