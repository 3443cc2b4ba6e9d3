"""Log-probabilities in OpenAI's two notations, and the prompt's in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.engine.outputs import TokenLogprob
from graftlm.server.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    RankedToken,
    RatedToken,
)

# OpenAI's number for "very unlikely"; JSON has none for the logarithm of zero.
_LOWEST = -9999.0
_REPLACEMENT = "\ufffd"


def completion_logprobs(tokens: Sequence[TokenLogprob], text: str, *, start: int, num_top: int) -> CompletionLogprobs:
    """The arrays of /v1/completions.

    Args:
        tokens: the tokens that brought `text`.
        text: a piece of the answer, which begins at character `start` of the whole.
        num_top: how many alternatives were asked for; with 0 there are none to list.
    """
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [_alternatives(token, num_top) for token in tokens] if num_top else None,
        "text_offset": [start + offset for offset in text_offsets([token.text for token in tokens], text)],
    }


def text_offsets(tokens: Sequence[str], text: str) -> list[int]:
    """Where in `text` each token begins.

    Decoded alone, the tokens of one character are U+FFFD each, and special tokens leave no trace in the text; such
    tokens get the place where the next visible one may begin, and the text is found again at the next that matches.
    """
    offsets: list[int] = []
    position = num_unmatched = 0
    for token in tokens:
        found = text.find(token, position, position + num_unmatched + len(token)) if token else -1
        if found >= 0:
            offsets.append(found)
            position, num_unmatched = found + len(token), 0
        else:
            offsets.append(position)
            num_unmatched += 1
    return offsets


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The list of /v1/chat/completions."""
    content: list[ChatLogprob] = []
    for token in tokens:
        top = [_rated(text, logprob) for _, text, logprob in token.top]
        content.append({**_rated(token.text, token.logprob or 0.0), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(tokens: Sequence[TokenLogprob], *, num_top: int) -> PromptLogprobs:
    """For each of the prompt's tokens the token itself and the `num_top` likeliest, by id."""
    return [None if token.logprob is None else _ranked(token, token.logprob, num_top) for token in tokens]


def _ranked(token: TokenLogprob, logprob: float, num_top: int) -> dict[str, RankedToken]:
    likeliest = ((*rated, rank) for rank, rated in enumerate(token.top[:num_top], 1))
    return {
        str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": text}
        for token_id, text, value, rank in ((token.token_id, token.text, logprob, token.rank), *likeliest)
    }


def _alternatives(token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    # Two ids may have the same text; the likelier one keeps the key.
    alternatives: dict[str, float] = {}
    for _, text, logprob in token.top[:num_top]:
        alternatives.setdefault(text, _finite(logprob))
    return alternatives


def _rated(text: str, logprob: float) -> RatedToken:
    is_whole = _REPLACEMENT not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
