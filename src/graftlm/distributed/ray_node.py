"""A Ray node on this machine, run by Ray's own command: the head of a new cluster, or one more machine of another's.

Imports no Ray, whose processes are children of this one and end with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from graftlm.errors import ConfigurationError

DEFAULT_PORT = 6379
# What Ray takes for this machine alone, and listens on nothing else then if it is told that it has no others.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray's own values let a dead node stand for half a minute and a frozen one for more than one: here a dead one is out
# within two seconds, and one that does not answer, though it may be busy, after a quarter of a minute. Results of up
# to 8 MiB travel with the answer: through the object store a prompt's hidden states took four times as long.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
    "max_direct_call_object_size": 8 << 20,
    "task_rpc_inlined_bytes_limit": 64 << 20,
}
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_IS_UP = "Ray runtime started."
_LINES_SHOWN = 12
_END_SECONDS = 30.0


class RayNode:
    """A node that is up when this is made.

    Args:
        arguments: of `ray start`. environment: besides this process's own.

    Raises:
        ConfigurationError: Ray is not installed, or does not start; the message has the end of what it printed.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigurationError("a cluster needs Ray", do="pip install 'graftlm[ray]'")
        self._process = subprocess.Popen(
            [*_RAY, "start", "--block", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
            # Ctrl-C is for this process, which then ends that one.
            start_new_session=True,
        )
        self._printed: deque[str] = deque(maxlen=_LINES_SHOWN)
        try:
            is_up = self._read_until(_IS_UP)
        except BaseException:
            self.close()
            raise
        if not is_up:
            raise ConfigurationError("Ray does not start here", got=self._told())

    def wait(self) -> None:
        """As long as it is up.

        Raises:
            ConfigurationError: always: it has ended by itself.
        """
        self._read_until(None)
        raise ConfigurationError("the Ray node has ended", got=self._told())

    def close(self) -> None:
        """End it, and with it what runs there. May be called twice."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _read_until(self, text: str | None) -> bool:
        """Whether it came before the end. Somebody has to read: Ray stands still when the pipe is full."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip(" -\n"):
                self._printed.append(line.strip())
            if text is not None and text in line:
                return True
        self._process.wait()
        return False

    def _told(self) -> str:
        return " ".join(self._printed)


def start_head(host: str, port: int, *, num_cpus: int | None, object_store_bytes: int) -> RayNode:
    """A new cluster.

    Args:
        host: by which other machines know this one. num_cpus: that it offers; None: all.

    Raises:
        ConfigurationError
    """
    is_alone = host in LOOPBACK
    arguments = [
        "--head",
        f"--node-ip-address={host}",
        f"--port={port}",
        "--include-dashboard=false",
        f"--object-store-memory={object_store_bytes}",
        f"--system-config={json.dumps(SYSTEM_CONFIG)}",
        *_cpus(num_cpus),
    ]
    return RayNode(arguments, {**authentication(), **(ALONE if is_alone else {})})


def start_member(address: str, *, host: str | None, num_cpus: int | None, object_store_bytes: int) -> RayNode:
    """One more machine of the cluster at `address`.

    Args:
        host: by which the others know this machine; None: as Ray finds it.

    Raises:
        ConfigurationError
    """
    arguments = [
        f"--address={address}",
        f"--object-store-memory={object_store_bytes}",
        *([] if host is None else [f"--node-ip-address={host}"]),
        *_cpus(num_cpus),
    ]
    return RayNode(arguments, authentication())


def authentication() -> dict[str, str]:
    """What has Ray ask everybody for a token, unless the environment says how it is to be."""
    return {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token"}


def token_file() -> Path | None:
    """Where this user's token is; None where the environment has it."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return None
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def make_token() -> None:
    """Have a token, if there is none.

    Raises:
        ConfigurationError: it cannot be made.
    """
    made = subprocess.run([*_RAY, "get-auth-token", "--generate"], capture_output=True, text=True, check=False)
    if made.returncode:
        raise ConfigurationError("Ray cannot make a token", got=made.stderr.strip()[-300:])


def _cpus(num_cpus: int | None) -> list[str]:
    return [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
