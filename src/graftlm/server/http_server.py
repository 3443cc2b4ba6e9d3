"""Running the application: a bound port, a word when it is ready, and an end that finishes what was begun."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import ConfigurationError
from graftlm.server.arrival import RECEIVE_TIMEOUT, protocol_with_timeout
from graftlm.server.tls import TLS

# What is left of the time to drain, and this much more, is for clients to take what they have been answered.
_MARGIN_SECONDS = 5
# How long a connection may lie idle. Clients forget theirs after 5 seconds (httpx, and with it openai), proxies mostly
# after 60: whoever waits less than the other side sends a request into a connection that is being closed.
KEEP_ALIVE_SECONDS = 75


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: a port in use is known at once. Nobody can connect yet.

    Args:
        port: 0 lets the system choose.

    Raises:
        ConfigurationError: the address is taken, forbidden or not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as cause:
        raise _unusable(host, port, cause) from cause
    try:
        # Without this a restarted server waits a minute for the old connections to be forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as cause:
        listener.close()
        raise _unusable(host, port, cause) from cause
    return listener


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class HTTPServer(uvicorn.Server):
    """Uvicorn around one engine.

    After the first SIGINT or SIGTERM new requests are answered 503, and running ones have `drain_seconds` to finish;
    then the engine ends them, connections are closed and `run` returns. A second signal ends the process at once.

    Args:
        on_ready: called when connections are accepted.
        receive_timeout: most seconds that the head of a request may take to arrive.
        tls: the certificate to show; None speaks plain HTTP.
    """

    def __init__(
        self,
        app: FastAPI,
        llm: AsyncLLM,
        *,
        drain_seconds: float = 10,
        on_ready: Callable[[], None],
        receive_timeout: float = RECEIVE_TIMEOUT,
        tls: TLS | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_with_timeout(receive_timeout),
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                server_header=False,
                ssl_certfile=None if tls is None else tls.certfile,
                ssl_keyfile=None if tls is None else tls.keyfile,
                ssl_keyfile_password=None if tls is None else tls.keyfile_password,
            )
        )
        self._llm = llm
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as cause:
            # Two programs may bind one port, only the first to listen has it.
            raise ConfigurationError("the port cannot be listened on", got=cause.strerror) from cause
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # While it drains the server still listens, so that whoever asks is told that it is on its way out.
        begun = time.monotonic()
        await self._llm.shutdown(drain_seconds=self._drain_seconds)
        left = max(self._drain_seconds - (time.monotonic() - begun), 0)
        self.config.timeout_graceful_shutdown = int(left) + _MARGIN_SECONDS
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            # At once: no wait for threads, tasks or buffers. The shell's number for death by a signal.
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


def _unusable(host: str, port: int, cause: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot listen on {host}:{port}",
        got=cause.strerror,
        do="choose another --host or --port, or stop the other server",
    )
