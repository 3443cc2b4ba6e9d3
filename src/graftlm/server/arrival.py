"""How a request may arrive: not too slowly, and framed in one way only. Knows bytes and time, not what is asked."""

from __future__ import annotations

import asyncio

import h11
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from graftlm.server.errors import CODE_OF_STATUS, ErrorReply

# Seconds that a client has for the head of a request, and again for every begun MiB of its body.
RECEIVE_TIMEOUT = 60.0
_TIMED_BYTES = 1 << 20


def protocol_with_timeout(seconds: float) -> type[H11Protocol]:
    """Uvicorn's protocol, for clients that take at most this long for the head of a request: then the connection is
    closed. h11 refuses heads of more than 64 KiB."""

    class HeadTimeout(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._timer is None:
                # The first bytes of the connection's next request: from now on uvicorn does not count it as idle.
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return HeadTimeout


class BodyArrival:
    """Middleware that answers 408 to a body that comes too slowly, and 400 to one whose end two headers tell: a proxy
    might go by the other one, and take the rest for somebody else's request."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if {"content-length", "transfer-encoding"} <= {*HTTPConnection(scope).headers}:
            await _AMBIGUOUS.response({"connection": "close"})(scope, receive, send)
            return
        begun, num_bytes, more_body = asyncio.get_running_loop().time(), 0, True

        async def receive_in_time() -> Message:
            nonlocal num_bytes, more_body
            if not more_body:
                return await receive()
            deadline = begun + self._seconds * (1 + num_bytes / _TIMED_BYTES)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _TooSlow from None
            num_bytes += len(message.get("body", b""))
            more_body = message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_in_time, send)
        except _TooSlow:
            message = (
                f"the request body comes too slowly; allowed: {self._seconds:g} seconds, and as many for each MiB; "
                "do: send it again"
            )
            reply = ErrorReply(status=408, message=message, code=CODE_OF_STATUS[408])
            await reply.response({"connection": "close"})(scope, receive, send)


class _TooSlow(Exception):
    """Nothing has been answered: bodies are read before they are looked at."""


_AMBIGUOUS = ErrorReply(
    status=400,
    message="the request has both a content-length and a transfer-encoding; do: send one of them",
    code="ambiguous_length",
)
