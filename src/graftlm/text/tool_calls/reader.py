"""Reading calls out of an answer while it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

import regex

from graftlm.text.tool_calls.formats import ToolCallFormat


@dataclass(frozen=True, kw_only=True)
class CallBegun:
    """A call of a function that was offered. index: which of the answer's calls it is."""

    index: int
    name: str


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """The next piece of a call's arguments. The pieces joined are a JSON object, unless the call is given up."""

    index: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CallGivenUp:
    """What looked like calls is none from here on.

    index: of the call that has begun, if one has. text: all of what is no call. rest: what of it was in no event yet.
    """

    index: int | None
    text: str
    rest: str


ToolEvent = str | CallBegun | CallArguments | CallGivenUp


class ToolCallReader:
    """Takes an answer piece by piece; gives its text, and its calls as they grow. Where the pieces end changes nothing
    but where the events' texts end. Blanks between text and calls are dropped.

    Args:
        names: of the functions that were offered. A call of any other is text.
    """

    def __init__(self, form: ToolCallFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._step: Callable[[], bool] = self._read_text if form.marker is not None else self._read_opening
        self._buffer = ""
        self._blanks = ""
        self._raw = ""
        self._arguments: _Arguments | None = None
        self._events: list[ToolEvent] = []
        self.num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        """What one more piece makes certain."""
        self._buffer += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> list[ToolEvent]:
        """What is left, once the answer has ended."""
        if self._step in (self._read_text, self._read_plain, self._read_opening):
            self._say(self._buffer)
        elif self._step != self._read_following:
            self._give_up()
        elif self._buffer.strip():
            self._say(self._buffer)
        if not self.num_calls and self._blanks:
            self._events.append(self._blanks)
        return self._taken()

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        """Text, but for the blanks at its end, which may stand before a call."""
        said = (self._blanks + text).rstrip()
        if said:
            self._events.append(said)
            self._blanks = (self._blanks + text)[len(said) :]
        else:
            self._blanks += text
        self._buffer = ""

    def _read_plain(self) -> bool:
        self._say(self._buffer)
        return False

    def _read_text(self) -> bool:
        marker = self._form.marker or ""
        before, found, rest = self._buffer.partition(marker)
        if found:
            self._say(before)
            self._buffer, self._raw, self._step = rest, marker, self._read_header
            return True
        sizes = range(min(len(marker) - 1, len(before)), 0, -1)
        held = next((size for size in sizes if before.endswith(marker[:size])), 0)
        self._say(before[: len(before) - held])
        self._buffer = before[len(before) - held :]
        return False

    def _read_opening(self) -> bool:
        match = self._form.opening.match(self._buffer, partial=True)
        if match is None:
            self._step = self._read_plain
            return True
        return self._pass(match, self._read_header)

    def _read_header(self) -> bool:
        match = self._form.header.match(self._buffer, partial=True)
        if match is None:
            # Keys in another order, or others beside them: known when the object is complete.
            return self._go_on(self._read_object) if self._buffer.lstrip(" \n\t[").startswith("{") else self._give_up()
        if match.partial:
            return False
        if match["name"] not in self._names:
            return self._give_up()
        self._events.append(CallBegun(index=self.num_calls, name=match["name"]))
        self._arguments = _Arguments(self._form.ends_arguments)
        return self._pass(match, self._read_arguments)

    def _read_object(self) -> bool:
        start = self._buffer.index("{")
        end = _Arguments(None).end_in(self._buffer[start:])
        if end is None:
            return False
        call = _call_of(self._buffer[start : start + end])
        if call is None or call[0] not in self._names:
            return self._give_up()
        name, arguments = call
        self._events += [
            CallBegun(index=self.num_calls, name=name),
            CallArguments(index=self.num_calls, text=arguments),
        ]
        self._take(start + end)
        self.num_calls += 1
        return self._go_on(self._read_following)

    def _read_arguments(self) -> bool:
        arguments = self._arguments
        assert arguments is not None
        end = arguments.end_in(self._buffer)
        if self._form.ends_arguments is None:
            piece = self._take(len(self._buffer) if end is None else end)
            arguments.text += piece
            if piece:
                self._events.append(CallArguments(index=self.num_calls, text=piece))
        elif end is not None:
            arguments.text = self._take(end)
        if end is None:
            return False
        try:
            text = self._form.to_json(arguments.text)
            json.loads(text)
        except (ValueError, RecursionError):
            return self._give_up()
        if self._form.ends_arguments is not None:
            self._events.append(CallArguments(index=self.num_calls, text=text))
        return self._go_on(self._read_tail)

    def _read_tail(self) -> bool:
        match = self._form.tail.match(self._buffer, partial=True)
        if match is None:
            return self._give_up()
        if not match.partial:
            self.num_calls += 1
            self._arguments = None
        return self._pass(match, self._read_following)

    def _read_following(self) -> bool:
        """Another call, the end of the calls, or neither of them."""
        waits = not self._buffer.strip()
        for pattern, step in (
            (self._form.following, self._read_header),
            (self._form.closing, self._read_text if self._form.marker is not None else self._read_plain),
        ):
            match = None if pattern is None else pattern.match(self._buffer, partial=True)
            if match is not None and not match.partial:
                return self._pass(match, step)
            waits = waits or match is not None
        self._raw = ""
        has_more = self._form.closing is None and self._form.following is None
        if has_more or not waits:
            return self._go_on(self._read_text if self._form.marker is not None else self._read_plain)
        return False

    def _pass(self, match: regex.Match[str], step: Callable[[], bool]) -> bool:
        """Go on behind a match, if it is whole."""
        if match.partial:
            return False
        self._take(match.end())
        return self._go_on(step)

    def _go_on(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._raw += taken
        return taken

    def _give_up(self) -> bool:
        """Everything from here on is text, the call that has begun included."""
        begun = None if self._arguments is None else self.num_calls
        streamed = self._arguments is not None and self._form.ends_arguments is None
        rest = self._buffer if streamed else self._raw + self._buffer
        text = self._raw + self._buffer
        self._events.append(CallGivenUp(index=begun, text=self._blanks + text, rest=self._blanks + rest))
        self._blanks = self._buffer = self._raw = ""
        self._arguments = None
        return self._go_on(self._read_plain) and False


class _Arguments:
    """Arguments so far, and where they end: at a text, or with the brace that closes the first one."""

    def __init__(self, ends_with: str | None) -> None:
        self.text = ""
        self._ends_with = ends_with
        self._depth = 0
        self._in_string = self._escaped = False

    def end_in(self, piece: str) -> int | None:
        """Where they end in the next piece. Of those that end at a text, all of them are looked at each time."""
        if self._ends_with is not None:
            found = piece.find(self._ends_with)
            return None if found < 0 else found
        for index, char in enumerate(piece):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0:
                    return index + 1
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call written as an object with any keys beside them."""
    try:
        call = json.loads(text)
        call = call.get("function") if isinstance(call.get("function"), dict) else call
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
