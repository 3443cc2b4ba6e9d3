"""What a request gives back. The same objects serve `generate` (complete) and `stream` (deltas)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from graftlm.errors import GraftError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the model's own distribution, before penalties, bias and temperature.

    `text` is what the tokenizer decodes the single token to; `top` holds the k most likely tokens, best first.
    `rank` is one more than there are likelier tokens. `logprob` and `rank` are None for the first token of a prompt,
    which nothing predicts.
    """

    token_id: int
    text: str
    logprob: float | None
    rank: int | None = None
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer. In a stream, `text`, `token_ids` and `logprobs` are what is new since the last delta.

    `stop_reason` is the stop string or stop token id that ended it; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Answer to one prompt. `finished` is true once every one of its `n` answers has a finish reason.

    In a stream each delta carries the answers that moved (usually one), the first also the prompt's log-probabilities.
    `num_output_tokens` counts all answers so far. `num_cached_tokens` is how many of the prompt's tokens were in the
    cache when its first answer began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    adapter: str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestFailure:
    """A request that cannot be answered, and why."""

    request_id: str
    error: GraftError


class OutputCollector:
    """Joins the deltas of one request to its complete output."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._answers: dict[int, list[CompletionOutput]] = {}

    def add(self, delta: RequestOutput) -> None:
        self._last = delta
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        for answer in delta.outputs:
            self._answers.setdefault(answer.index, []).append(answer)

    @property
    def finished(self) -> bool:
        return self._last is not None and self._last.finished

    def result(self) -> RequestOutput:
        """The output so far.

        Raises:
            ValueError: no delta has come yet.
        """
        if self._last is None:
            raise ValueError("no delta was added")
        outputs = tuple(_join(self._answers[index]) for index in sorted(self._answers))
        return replace(self._last, outputs=outputs, prompt_logprobs=self._prompt_logprobs)


def _join(deltas: list[CompletionOutput]) -> CompletionOutput:
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
    )
