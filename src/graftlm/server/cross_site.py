"""Requests that a browser sends for another site's page. Knows headers, not what is asked."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.server.body_limit import drain
from graftlm.server.errors import CODE_OF_STATUS, ErrorReply


class CrossSite:
    """Middleware that answers 403 to what changes something and comes from a page of elsewhere. Browsers send forms and
    bodiless requests without asking the server first, and one without API keys would do as they say.

    Args:
        origins: of the pages that may, or "*" for any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = HTTPConnection(scope).headers
            # Browsers say so themselves, and scripts cannot; nobody else does.
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            if is_foreign and not {"*", headers.get("origin")} & self._origins:
                await drain(receive)
                await _FOREIGN.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


_FOREIGN = ErrorReply(
    status=403,
    message="pages of other sites may not use this server; do: serve with --cors-origin ORIGIN",
    code=CODE_OF_STATUS[403],
)
