"""The text side of one answer: ids become text, stop strings end it, log-probabilities get their tokens' text."""

from __future__ import annotations

from collections.abc import Iterable

from graftlm.engine.outputs import TokenLogprob
from graftlm.engine.request import Request
from graftlm.engine.sampler import RowLogprobs
from graftlm.text import IncrementalDetokenizer, StopStringFilter, Tokenizer


class AnswerText:
    """Text of one request's answer, piece by piece. The pieces joined are the whole text."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.sent_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStringFilter(params.stop, keep_match=params.include_stop_str_in_output)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has appeared, if one has."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that one more token makes certain. Call after the token was appended to the request."""
        ended = self._request.finish_reason == "stop" and token_id in self._request.stop_token_ids
        if ended and not self._request.params.include_stop_str_in_output:
            return ""  # an end token has no text
        text = self._detokenizer.push(token_id)
        if len(self._request.output_token_ids) <= self._request.params.min_tokens:
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        """What was held back, once the request has finished; empty after a stop string."""
        if self.matched_stop is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()


def describe_logprobs(token_id: int, row: RowLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    """A row's log-probabilities with the text of each token."""
    return TokenLogprob(
        token_id=token_id,
        text=tokenizer.token_text(token_id),
        logprob=row.logprob,
        rank=row.rank,
        top=tuple(_with_text(zip(row.top_ids, row.top_logprobs, strict=True), tokenizer)),
    )


def _with_text(pairs: Iterable[tuple[int, float]], tokenizer: Tokenizer) -> Iterable[tuple[int, str, float]]:
    return ((token_id, tokenizer.token_text(token_id), logprob) for token_id, logprob in pairs)
