"""What a request has had computed. Knows streams; nothing of who reads them or what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from graftlm.engine.request_stream import RequestStream


class Work:
    """The engine's requests behind one HTTP request; none before it is submitted, several for a list of prompts."""

    def __init__(self) -> None:
        self.streams: list[RequestStream] = []

    def add(self, streams: Sequence[RequestStream]) -> None:
        self.streams += streams

    @property
    def num_prompt_tokens(self) -> int:
        """Cached tokens included."""
        return sum(len(stream.prompt_token_ids) for stream in self.streams)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers, so far."""
        return sum(stream.num_output_tokens for stream in self.streams)


def work_of(connection: HTTPConnection) -> Work:
    """The work of a request that has come through `Authentication`; none, if it was refused before that."""
    work: Work | None = getattr(connection.state, "work", None)
    return Work() if work is None else work
