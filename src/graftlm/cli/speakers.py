"""Who answers in a conversation: a model in this process, or a server's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from graftlm.errors import ModelNotFound, RemoteError

if TYPE_CHECKING:
    from graftlm import AsyncLLM, SamplingParams
    from graftlm.cli.api_client import ApiClient

Messages = Sequence[Mapping[str, str]]


class Speaker(Protocol):
    """A base model with adapters."""

    @property
    def base(self) -> str:
        """The base model's name."""
        ...

    async def names(self) -> list[str]:
        """Every name that answers, the base's first."""
        ...

    async def resolve(self, name: str) -> str:
        """The name, if it answers.

        Raises:
            ModelNotFound
        """
        ...

    def answer(self, messages: Messages, model: str) -> AsyncGenerator[str]:
        """The answer in pieces. Closing the iterator stops the work on it.

        Raises:
            InvalidRequest, RemoteError: the conversation cannot be answered.
        """
        ...

    async def close(self) -> None: ...


class LocalSpeaker:
    """An engine in this process, shut down by `close`."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    @property
    def base(self) -> str:
        return self._llm.model_name

    async def names(self) -> list[str]:
        return [self.base, *self._llm.residency]

    async def resolve(self, name: str) -> str:
        return self._llm.resolve_model(name) or self.base

    async def answer(self, messages: Messages, model: str) -> AsyncGenerator[str]:
        adapter = self._llm.resolve_model(model)
        token_ids = await self._llm.apply_chat_template(messages, adapter=adapter)
        stream = await self._llm.add_request({"prompt_token_ids": list(token_ids)}, self._params, adapter=adapter)
        try:
            async for delta in stream:
                yield "".join(answer.text for answer in delta.outputs)
        finally:
            stream.abort()

    async def close(self) -> None:
        await self._llm.shutdown()


class RemoteSpeaker:
    """A server, asked by `client`.

    Args:
        base: the server's base model.
        sampling: fields of every request.
    """

    def __init__(self, client: ApiClient, base: str, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._base = base
        self._sampling = sampling

    @classmethod
    async def connect(cls, client: ApiClient, sampling: Mapping[str, Any]) -> RemoteSpeaker:
        """Raises RemoteError: no server answers, or it serves nothing."""
        names = await _listed(client)
        if not names:
            raise RemoteError("the server serves no model")
        return cls(client, names[0], sampling)

    @property
    def base(self) -> str:
        return self._base

    async def names(self) -> list[str]:
        return await _listed(self._client)

    async def resolve(self, name: str) -> str:
        # A weighted sum is not listed; the server knows whether it answers.
        try:
            await self._client.fetch("GET", f"/v1/models/{name}")
        except RemoteError as refused:
            if refused.code != "model_not_found":
                raise
            raise ModelNotFound(name, await self.names()) from None
        return name

    async def answer(self, messages: Messages, model: str) -> AsyncGenerator[str]:
        body = {"model": model, "messages": list(messages), **self._sampling}
        async with aclosing(self._client.stream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                yield "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])

    async def close(self) -> None:
        await self._client.aclose()


async def _listed(client: ApiClient) -> list[str]:
    return [card["id"] for card in (await client.fetch("GET", "/v1/models"))["data"]]
