"""A name for every request, in its reply and in the log. Knows ASGI messages, nothing of what is in the body."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
# What may go into a header and a log line as it is.
_ACCEPTED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Middleware that takes the client's x-request-id, or makes one where there is none that can be repeated, and puts
    it into the reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        given = connection.headers.get(HEADER, "")
        connection.state.request_id = request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(connection: HTTPConnection) -> str:
    """The id of a request that has come through `RequestIds`."""
    request_id: str = connection.state.request_id
    return request_id
