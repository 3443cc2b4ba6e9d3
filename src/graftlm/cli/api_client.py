"""A client of the HTTP API: of a server by its URL, or of an engine in this process. Knows routes and errors, nothing
of what is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from graftlm.errors import ConfigurationError, RemoteError

if TYPE_CHECKING:
    from graftlm import AsyncLLM

ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar=["GRAFT_API_KEY", "OPENAI_API_KEY"], help="Key for the server.", show_envvar=True),
]
UrlOption = Annotated[str, typer.Option("--url", envvar="GRAFT_URL", help="The server.", show_envvar=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the server's own JSON.")]
LOCAL = "http://127.0.0.1:8000"
_CONNECT_SECONDS = 10.0


def fetch(url: str, api_key: str | None, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """What one server answers to one request.

    Raises:
        RemoteError, ConfigurationError: as `ApiClient`.
    """

    async def ask() -> Any:
        client = ApiClient.of_url(url, api_key)
        try:
            return await client.fetch(method, path, body)
        finally:
            await client.aclose()

    return asyncio.run(ask())


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


class ApiClient:
    """Requests to one server. All methods belong to one event loop; close it with `aclose`.

    Raises:
        RemoteError: from every method: the server cannot be reached, or refuses; the message is the server's.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @classmethod
    def of_url(cls, url: str, api_key: str | None) -> ApiClient:
        """Args: url: of the server, with or without /v1.

        Raises:
            ConfigurationError: it is no URL of a server.
        """
        if not is_url(url) or not httpx.URL(url).host:
            raise ConfigurationError("this is not the URL of a server", got=url, allowed="http://HOST:PORT")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        base = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=None)
        return cls(httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits))

    @classmethod
    def of_engine(cls, llm: AsyncLLM) -> ApiClient:
        """A client that needs no network; the engine stays the caller's."""
        from graftlm.server import create_app

        transport = httpx.ASGITransport(app=create_app(llm), raise_app_exceptions=False)
        return cls(httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """The reply, whatever its status."""
        return await self._send("POST", path, body)

    async def fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The content of a reply that must be a success."""
        reply = await self._send(method, path, body)
        _check(reply.status_code, reply.content)
        return reply.json()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed answer. Closing the iterator ends the work on it."""
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
                if reply.is_error:
                    _check(reply.status_code, await reply.aread())
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    chunk: dict[str, Any] = json.loads(data)
                    if "error" in chunk:
                        raise RemoteError(_message(chunk))
                    yield chunk
        except httpx.HTTPError as cause:
            raise self._unreachable(cause) from cause

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.HTTPError as cause:
            raise self._unreachable(cause) from cause

    def _unreachable(self, cause: httpx.HTTPError) -> RemoteError:
        return RemoteError("the server does not answer", got=f"{self._http.base_url}: {cause or type(cause).__name__}")


def _check(status: int, content: bytes) -> None:
    if status < 400:
        return
    try:
        reply = json.loads(content)
        message, code = _message(reply), reply["error"].get("code")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, code = f"the server answered {status} and no error that can be read", None
    raise RemoteError(message, code=code)


def _message(reply: Mapping[str, Any]) -> str:
    return str(reply["error"]["message"])
