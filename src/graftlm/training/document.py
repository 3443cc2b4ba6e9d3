"""A row as tokens, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.errors import InvalidRequest
from graftlm.text import Tokenizer
from graftlm.text.tokenizer import TextToken


@dataclass(frozen=True, kw_only=True)
class Document:
    """learnt: which tokens the loss is taken of, as many as token_ids; the first is predicted by nothing."""

    token_ids: tuple[int, ...]
    learnt: tuple[bool, ...]

    @property
    def targets(self) -> tuple[int, ...]:
        """Places of the tokens that are learnt, ascending."""
        return tuple(place for place, is_learnt in enumerate(self.learnt) if is_learnt and place)

    def part(self, start: int, stop: int) -> Document:
        return Document(token_ids=self.token_ids[start:stop], learnt=self.learnt[start:stop])


class RowRefused(Exception):
    """A row nothing can be learnt from; the argument says why."""


def encode_row(content: Mapping[str, Any], tokenizer: Tokenizer) -> Document:
    """The document of one row.

    `messages`: by the chat template; assistant turns are learnt, the token that closes them included. `prompt` and
    `completion`: the completion is learnt. `text`: all of it. The last two end with the tokenizer's end token.

    Raises:
        RowRefused
    """
    kinds = [kind for kind in ("messages", "prompt", "text") if kind in content]
    if len(kinds) != 1:
        found = ", ".join(content) or "none"
        raise RowRefused(f"needs messages, or prompt and completion, or text; its keys are {found[:200]}")
    try:
        if kinds == ["messages"]:
            return _encode_chat(_messages(content["messages"]), tokenizer)
        if kinds == ["text"]:
            return _encode_text("", _string(content, "text"), tokenizer)
        return _encode_text(_string(content, "prompt"), _string(content, "completion"), tokenizer)
    except InvalidRequest as error:
        raise RowRefused(str(error)) from error


def _string(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or (not value and key != "prompt"):
        raise RowRefused(f"{key} is not a text" if key in content else f"{key} is missing")
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowRefused("messages is not a list with something in it")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RowRefused(f"messages[{number}] needs a role and a content")
    if not any(message["role"] == "assistant" for message in value):
        raise RowRefused("no turn of the assistant's, so there is nothing to learn")
    return value


def _encode_text(prompt: str, text: str, tokenizer: Tokenizer) -> Document:
    tokens = tokenizer.encode_with_offsets(prompt + text)
    ids = [token.token_id for token in tokens]
    learnt = [_overlaps(token, len(prompt), len(prompt) + len(text)) for token in tokens]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
        learnt.append(True)
    return Document(token_ids=tuple(ids), learnt=tuple(learnt))


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Document:
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    tokens = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    learnt = [False] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, stop = _turn(text, messages, index, tokenizer)
        places = [place for place, token in enumerate(tokens) if _overlaps(token, start, stop)]
        for place in _without_separator(places, tokens, text, tokenizer):
            learnt[place] = True
    return Document(token_ids=tuple(token.token_id for token in tokens), learnt=tuple(learnt))


def _turn(text: str, messages: Sequence[Mapping[str, Any]], index: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """Characters of an assistant's turn: what the whole conversation has beyond the prompt for that turn, up to where
    the conversation with the turn ends."""
    prompt = tokenizer.render_chat(messages[:index], add_generation_prompt=True) if index else ""
    answered = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
    if not (text.startswith(answered) and answered.startswith(prompt)):
        raise RowRefused(
            f"the chat template renders messages[{index}] otherwise once others follow, so its tokens cannot be found"
        )
    return len(prompt), len(answered)


def _without_separator(
    places: Sequence[int], tokens: Sequence[TextToken], text: str, tokenizer: Tokenizer
) -> Sequence[int]:
    """Without the white space many templates put after the token that closes a turn: no model has to say it."""
    closing = [number for number, place in enumerate(places) if tokenizer.is_special(tokens[place].token_id)]
    if not closing:
        return places
    last = places[closing[-1]]
    after = text[tokens[last].stop : tokens[places[-1]].stop]
    return places[: closing[-1] + 1] if not after.strip() else places


def _overlaps(token: TextToken, start: int, stop: int) -> bool:
    return start <= token.start < stop or token.start < start < token.stop
