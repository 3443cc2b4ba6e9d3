"""Files of requests, one JSON object a line: OpenAI's batch format, or prompts. Knows what a row asks for and how its
answer is written down; knows nothing of who answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import ConfigurationError

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_BATCH_FIELDS = {"custom_id", "method", "url", "body"}
# A row's own name for what the API calls the model.
_NAMES = ("model", "adapter")


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One request. is_openai: whether its answer is written in OpenAI's batch format."""

    row_id: str
    url: str
    body: Mapping[str, Any]
    is_openai: bool

    def record(self, status: int, request_id: str, reply: Mapping[str, Any]) -> dict[str, Any]:
        """What is written down of a reply, a refusal included."""
        if self.is_openai:
            response = {"status_code": status, "request_id": request_id, "body": reply}
            return {"id": f"batch_req_{request_id}", "custom_id": self.row_id, "response": response, "error": None}
        if status >= 400:
            return {"id": self.row_id, "model": self.body["model"], "error": reply["error"]}
        first, *others = reply["choices"]
        record = {"id": self.row_id, "model": self.body["model"], "text": _text(first)}
        if others:
            record["texts"] = [_text(choice) for choice in reply["choices"]]
        return {**record, "finish_reason": first["finish_reason"], "usage": reply["usage"]}


class BatchFile:
    """The rows of a file, each read when it is needed.

    Args:
        defaults: fields of every body that does not say otherwise. model: for prompts that name none.
        chat: whether a prompt is a user's message.

    Raises:
        ConfigurationError: the file cannot be read, a line is no row, or two rows have one id; the message has the
            line.
    """

    def __init__(self, path: Path, *, defaults: Mapping[str, Any], model: str, chat: bool) -> None:
        self._path = path
        self._defaults = defaults
        self._model = model
        self._chat = chat
        # Where each row begins, in bytes, and its line's number.
        self._places: dict[str, tuple[int, int]] = {}
        self._scan()

    @property
    def row_ids(self) -> list[str]:
        return list(self._places)

    def rows(self, row_ids: list[str]) -> Iterator[BatchRow]:
        with self._path.open("rb") as file:
            for row_id in row_ids:
                offset, number = self._places[row_id]
                file.seek(offset)
                yield self._row(file.readline(), number)

    def _scan(self) -> None:
        try:
            with self._path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        row_id = self._row(line, number).row_id
                        if row_id in self._places:
                            raise self._error(number, f"the id {row_id!r} is that of an earlier row")
                        self._places[row_id] = offset, number
                    offset += len(line)
        except OSError as cause:
            raise ConfigurationError("the file cannot be read", got=f"{self._path}: {cause.strerror}") from cause

    def _row(self, line: bytes, number: int) -> BatchRow:
        try:
            content = json.loads(line)
        except ValueError as cause:
            raise self._error(number, "this is not JSON") from cause
        if not isinstance(content, dict):
            raise self._error(number, "a row is a JSON object")
        return self._openai_row(content, number) if "custom_id" in content else self._prompt_row(content, number)

    def _openai_row(self, content: dict[str, Any], number: int) -> BatchRow:
        row_id, url, body = content["custom_id"], content.get("url"), content.get("body")
        if set(content) != _BATCH_FIELDS or content["method"] != "POST" or url not in URLS:
            raise self._error(number, f"a batch row has custom_id, method POST, a url of {', '.join(URLS)}, and body")
        if not isinstance(row_id, str) or not isinstance(body, dict):
            raise self._error(number, "custom_id is a string and body an object")
        if body.get("stream"):
            raise self._error(number, "a row of a batch has no stream")
        return BatchRow(row_id=row_id, url=url, body=self._with_defaults(url, body), is_openai=True)

    def _prompt_row(self, content: dict[str, Any], number: int) -> BatchRow:
        row_id = content.pop("id", f"line-{number}")
        if not isinstance(row_id, str | int) or isinstance(row_id, bool):
            raise self._error(number, "id is a string or a number")
        if ("prompt" in content) == ("messages" in content):
            raise self._error(number, "a row has either prompt or messages")
        if "stream" in content:
            raise self._error(number, "a row of a batch has no stream")
        if sum(name in content for name in _NAMES) > 1:
            raise self._error(number, "a row has either model or adapter")
        names = [content.pop(name) for name in _NAMES if name in content]
        body = {"model": names[0] if names and names[0] is not None else self._model, **content}
        if self._chat and "prompt" in body:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return BatchRow(row_id=str(row_id), url=url, body=self._with_defaults(url, body), is_openai=False)

    def _with_defaults(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        defaults = dict(self._defaults)
        if "max_completion_tokens" in body:
            defaults.pop("max_tokens", None)
        if url == "/v1/responses" and "max_tokens" in defaults:
            defaults["max_output_tokens"] = defaults.pop("max_tokens")
        return {**defaults, **body}

    def _error(self, number: int, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}:{number}: {what}")


def _text(choice: Mapping[str, Any]) -> Any:
    return choice["message"]["content"] if "message" in choice else choice["text"]
