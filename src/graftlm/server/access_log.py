"""One line of JSON for every request that was answered, or whose client left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.callers import caller_of
from graftlm.server.errors import error_code_of
from graftlm.server.request_ids import request_id_of
from graftlm.server.work import work_of


class AccessLog:
    """Middleware inside of `RequestIds`.

    A line has `time` (of its end, UTC), `request_id`, `client`, `method`, `path` without the query, `model` if the body
    named one, `tenant` (the API key's name), `prompt_tokens`, `output_tokens`, `status`, `error` (its code) and
    `seconds` to the last byte. `status` is null when the client left before there was a reply.

    Args:
        write: gets each line, without a line break.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status: int | None = None

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception:
            # Answered further out, by the handler for what nobody foresaw.
            status = status or 500
            raise
        finally:
            self._write(_line(HTTPConnection(scope), status, time.perf_counter() - begun))


def _line(connection: HTTPConnection, status: int | None, seconds: float) -> str:
    tenant, work = caller_of(connection).tenant, work_of(connection)
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": request_id_of(connection),
        "client": None if connection.client is None else connection.client.host,
        "method": connection.scope["method"],
        "path": connection.scope["path"],
        "model": getattr(connection.state, "model", None),
        "tenant": tenant and tenant.name,
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": work.num_output_tokens,
        "status": status,
        "error": error_code_of(connection),
        "seconds": round(seconds, 6),
    }
    return json.dumps(entry)
