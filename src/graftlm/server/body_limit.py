"""How large a request body may be. Knows ASGI messages, nothing of what is in the body."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.errors import CODE_OF_STATUS, ErrorReply

# Bytes read and thrown away before a body that is too large is answered: a client still busy sending would otherwise
# see a reset connection in place of the 413.
_DRAIN_FACTOR = 8
# The same for requests that are refused whatever is in them.
_DRAIN_BYTES = 64 << 20


class BodyLimit:
    """Middleware that reads each body before the application does, and answers 413 once it is over `max_bytes`.

    Args:
        exceptions: limits of single paths.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, exceptions: Mapping[str, int] = MappingProxyType({})) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._exceptions = exceptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._exceptions.get(scope["path"], self._max_bytes)
        body = bytearray()
        num_bytes = 0
        more_body = True
        while more_body and num_bytes <= _DRAIN_FACTOR * max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
            if num_bytes <= max_bytes:
                body += message.get("body", b"")
            more_body = message.get("more_body", False)
        if num_bytes > max_bytes:
            text = f"the request body is too large; allowed: {max_bytes} bytes"
            reply = ErrorReply(status=413, message=text, code=CODE_OF_STATUS[413])
            await reply.response({"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, _replayed(bytes(body), receive), send)


async def drain(receive: Receive) -> None:
    """Read a body and throw it away, before a request is refused because of its headers."""
    num_bytes = 0
    while num_bytes <= _DRAIN_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once and then whatever the connection says, which is how a client's leaving
    is heard."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
