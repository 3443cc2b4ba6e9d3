"""A row as tokens, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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


# The documents of one row: one, or one that is preferred and one that is not.
Example = tuple[Document, ...]


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


def encode_pair(content: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Document, Document]:
    """The two documents of a row that says which of two answers is better.

    `prompt`, `chosen` and `rejected`: texts, or lists of messages; without a prompt the lists are two conversations,
    and what they begin with alike is the prompt. OpenAI's `input`, `preferred_output` and `non_preferred_output` are
    the same. Only what follows the prompt is learnt.

    Raises:
        RowRefused
    """
    if "preferred_output" in content:
        content = _from_openai(content)
    if "chosen" not in content or "rejected" not in content:
        raise RowRefused(f"needs chosen and rejected; its keys are {(', '.join(content) or 'none')[:200]}")
    if content["chosen"] == content["rejected"]:
        raise RowRefused("chosen and rejected are the same, so there is nothing to learn")
    try:
        if isinstance(content["chosen"], str):
            return (
                _encode_text(_string(content, "prompt"), _string(content, "chosen"), tokenizer),
                _encode_text(_string(content, "prompt"), _string(content, "rejected"), tokenizer),
            )
        prompt, chosen, rejected = _conversations(content)
        return (
            _encode_chat([*prompt, *chosen], tokenizer, after=len(prompt)),
            _encode_chat([*prompt, *rejected], tokenizer, after=len(prompt)),
        )
    except InvalidRequest as error:
        raise RowRefused(str(error)) from error


def _from_openai(content: Mapping[str, Any]) -> dict[str, Any]:
    """Source: OpenAI's reference of fine-tuning, preference input object."""
    prompt = content.get("input")
    return {
        "prompt": prompt.get("messages") if isinstance(prompt, Mapping) else None,
        "chosen": content["preferred_output"],
        "rejected": content.get("non_preferred_output"),
    }


def _conversations(content: Mapping[str, Any]) -> tuple[list[dict[str, Any]], ...]:
    """Messages of the prompt, and of either answer."""
    chosen, rejected = (_messages(content[key], key) for key in ("chosen", "rejected"))
    if content.get("prompt") is not None:
        return _messages(content["prompt"], "prompt", answered=False), chosen, rejected
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    if same in (len(chosen), len(rejected)):
        raise RowRefused("one of chosen and rejected is only the beginning of the other")
    return chosen[:same], chosen[same:], rejected[same:]


def _string(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or (not value and key != "prompt"):
        raise RowRefused(f"{key} is not a text" if key in content else f"{key} is missing")
    return value


def _messages(value: object, key: str = "messages", *, answered: bool = True) -> list[dict[str, Any]]:
    """answered: the assistant must have a turn among them."""
    if not isinstance(value, list) or not value:
        raise RowRefused(f"{key} is not a list with something in it")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RowRefused(f"{key}[{number}] needs a role and a content")
    if answered and not any(message["role"] == "assistant" for message in value):
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


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, after: int = 0) -> Document:
    """after: number of messages in front that nothing is learnt of."""
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    tokens = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    learnt = [False] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < after:
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
