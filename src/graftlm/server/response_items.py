"""The items of a response's output: messages and calls of functions, as they grow."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from graftlm.engine.outputs import CompletionOutput, TokenLogprob
from graftlm.server.logprobs import chat_logprobs
from graftlm.server.tool_use import ToolUse
from graftlm.text.tool_calls import CallArguments, CallBegun, CallGivenUp

Event = tuple[str, dict[str, Any]]


class ResponseItems:
    """Reads one answer, as it comes or as a whole.

    A call that turns out to be none ends as an incomplete item of the stream and is no item of the output: what it was
    made of is text there, as it is in an answer that is not streamed.
    """

    def __init__(self, tools: ToolUse | None) -> None:
        self._reader = None if tools is None else tools.answer()
        self._output: list[dict[str, Any]] = []
        self._growing: dict[str, Any] | None = None
        self._num_begun = 0
        self._events: list[Event] = []

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._output

    def push(self, answer: CompletionOutput) -> list[Event]:
        """What one more piece of the answer adds: types of events, without `response.`, and what is in them."""
        is_last = answer.finish_reason is not None
        if self._reader is None:
            self._say(answer.text, answer.logprobs or ())
        else:
            for event in self._reader.events(answer.text, is_last=is_last):
                match event:
                    case str():
                        self._say(event)
                    case CallBegun():
                        self._begin_call(event.name, self._reader.new_call_id())
                    case CallArguments():
                        self._add_arguments(event.text)
                    case CallGivenUp():
                        if event.index is not None:
                            self._drop_call()
                        self._say(event.text)
        if is_last:
            if not self._num_begun:
                self._begin_message()
            self._end("incomplete" if answer.finish_reason == "length" else "completed")
        events, self._events = self._events, []
        return events

    def _say(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if not text and not logprobs:
            return
        item = self._growing
        if item is None or item["type"] != "message":
            item = self._begin_message()
        [part] = item["content"]
        rated = _rated(logprobs)
        part["text"] += text
        part["logprobs"] += rated
        self._tell("output_text.delta", **self._place_in_message(item), delta=text, logprobs=rated)

    def _begin_message(self) -> dict[str, Any]:
        item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        self._begin(item)
        item["content"] = [_part()]
        self._tell("content_part.added", **self._place_in_message(item), part=_part())
        return item

    def _begin_call(self, name: str, call_id: str) -> None:
        fields = {"call_id": call_id, "name": name, "arguments": ""}
        self._begin({"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", **fields})

    def _add_arguments(self, text: str) -> None:
        item = self._growing
        assert item is not None
        item["arguments"] += text
        self._tell("function_call_arguments.delta", **self._place(item), delta=text)

    def _drop_call(self) -> None:
        self._end("incomplete")
        self._output.pop()

    def _begin(self, item: dict[str, Any]) -> None:
        self._end("completed")
        self._num_begun += 1
        self._growing = item
        item["status"] = "in_progress"
        self._tell("output_item.added", output_index=self._num_begun - 1, item=dict(item))

    def _end(self, status: str) -> None:
        item = self._growing
        if item is None:
            return
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            place = self._place_in_message(item)
            self._tell("output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            self._tell("content_part.done", **place, part=part)
        elif status == "completed":
            self._tell("function_call_arguments.done", **self._place(item), arguments=item["arguments"])
        self._tell("output_item.done", output_index=self._num_begun - 1, item=item)
        self._output.append(item)
        self._growing = None

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": self._num_begun - 1, "item_id": item["id"]}

    def _place_in_message(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**self._place(item), "content_index": 0}

    def _tell(self, kind: str, **content: object) -> None:
        self._events.append((kind, content))


def _part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _rated(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """As in chat, but that the bytes of a part of a character, which are not known, are an empty list."""

    def listed(rated: Any) -> dict[str, Any]:
        return {**rated, "bytes": rated["bytes"] or []}

    return [
        {**listed(entry), "top_logprobs": [listed(other) for other in entry["top_logprobs"]]}
        for entry in chat_logprobs(tokens)["content"]
    ]
