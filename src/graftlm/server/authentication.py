"""Who sends a request, and whether their API key has anything left. Knows ASGI messages, nothing of bodies."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.server.api_keys import ApiKey, find_key
from graftlm.server.body_limit import drain
from graftlm.server.callers import ANYONE, NOBODY
from graftlm.server.errors import CODE_OF_STATUS, ErrorReply
from graftlm.server.key_file import KeyFile
from graftlm.server.playground.page import ASSETS
from graftlm.server.rate_limits import Account, Accounts, LimitReached
from graftlm.server.work import Work, work_of

# Probes tell nothing, and who asks them has no key to give. Neither has a browser that opens the page, which is the
# same for everyone.
OPEN_PATHS = frozenset({"/health", "/ready"} | {asset.path for asset in ASSETS})
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{part}-{resource}" for resource in ("requests", "tokens") for part in ("limit", "remaining", "reset")
)


class Authentication:
    """Middleware that finds out who the caller is, and keeps them to the limits of their key: 401 without a key that is
    known, 429 beyond a limit. Everything but reading (GET) counts.

    Replies to keys with limits carry OpenAI's x-ratelimit headers.

    Args:
        keys: None lets anyone do everything.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile | None) -> None:
        self._app = app
        self._keys = keys
        self._accounts = Accounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        connection.state.work = Work()
        connection.state.caller = ANYONE if self._keys is None else NOBODY
        if self._keys is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _key_of(connection, self._keys)
        if key is None:
            await drain(receive)
            await _UNKNOWN.response({"www-authenticate": "Bearer"})(scope, receive, send)
            return
        connection.state.caller = key.caller
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        else:
            await self._within_limits(key, scope, receive, send)

    async def _within_limits(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        account = self._accounts.of(key.name, key.limits)
        try:
            account.begin()
        except LimitReached as reached:
            await drain(receive)
            await _over_limit(reached).response(_headers(account))(scope, receive, send)
            return
        work = work_of(HTTPConnection(scope))
        num_used = 0

        def use() -> None:
            nonlocal num_used
            num_tokens = work.num_prompt_tokens + work.num_output_tokens
            account.use_tokens(num_tokens - num_used)
            num_used = num_tokens

        async def using(message: Message) -> None:
            use()
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_headers(account))
            await send(message)

        try:
            await self._app(scope, receive, using)
        finally:
            use()
            account.end()


def _key_of(connection: HTTPConnection, keys: KeyFile) -> ApiKey | None:
    scheme, _, credentials = connection.headers.get("authorization", "").partition(" ")
    return find_key(keys.keys, credentials.strip()) if scheme.lower() == "bearer" else None


_UNKNOWN = ErrorReply(
    status=401,
    message="no API key, or one that is not known; do: send the header 'Authorization: Bearer KEY'",
    code=CODE_OF_STATUS[401],
)


def _over_limit(reached: LimitReached) -> ErrorReply:
    wait = reached.retry_after_seconds
    return ErrorReply(
        status=429,
        message=f"{reached.what}; allowed: {reached.limit}; do: try again in {wait} second{'s' if wait > 1 else ''}",
        code="rate_limit_exceeded",
        retry_after_seconds=wait,
    )


def _headers(account: Account) -> dict[str, str]:
    headers = {}
    for resource, bucket in account.buckets.items():
        headers[f"x-ratelimit-limit-{resource}"] = str(bucket.per_minute)
        headers[f"x-ratelimit-remaining-{resource}"] = str(max(int(bucket.level), 0))
        headers[f"x-ratelimit-reset-{resource}"] = format_duration(bucket.seconds_until(bucket.per_minute))
    return headers


def format_duration(seconds: float) -> str:
    """As OpenAI's headers spell it: 120ms, 8.64s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
