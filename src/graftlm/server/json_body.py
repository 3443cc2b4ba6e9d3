"""Bodies read as JSON, of which there are no two readings and not too much to look at. Knows text, not fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# Of all objects in a body together. Each takes 20 µs to be checked, in which nobody else is served.
MAX_MEMBERS = 1 << 15


class JsonRoute(APIRoute):
    """A route whose body is refused if an object in it has a key twice, because of two readers each may go by another
    one, or if its objects have too many members."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unambiguous(request: Request) -> Response:
            return await handle(_UnambiguousRequest(request.scope, request.receive))

        return handle_unambiguous


class _UnambiguousRequest(Request):
    async def json(self) -> Any:
        """Raises json.JSONDecodeError, which FastAPI makes a validation error of."""
        num_members = 0

        def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            nonlocal num_members
            num_members += len(pairs)
            if num_members > MAX_MEMBERS:
                raise json.JSONDecodeError(f"its objects have more than {MAX_MEMBERS} members", "", 0)
            members: dict[str, Any] = {}
            for name, value in pairs:
                if name in members:
                    raise json.JSONDecodeError(f"{name!r:.100} is there twice", "", 0)
                members[name] = value
            return members

        return json.loads(await self.body(), object_pairs_hook=checked)
