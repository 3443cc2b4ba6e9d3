"""A prompt and the n answers it asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from graftlm.adapters import Adapter
from graftlm.engine.answer import AnswerText
from graftlm.engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from graftlm.engine.request import Request
from graftlm.engine.timings import RequestTimings
from graftlm.text import Tokenizer


@dataclass(kw_only=True, eq=False)
class Job:
    """What the engine core runs and reports on.

    prompt_token_ids: as sent, without the adapter's virtual tokens.
    adapter: held in the registry by whoever made the job, until the core retires it.
    tokenizer: the adapter's own, or the base's. texts: one per request.
    prompt_logprobs: grows while the prompt is computed, if it was asked for.
    """

    job_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    requests: tuple[Request, ...]
    texts: tuple[AnswerText, ...]
    adapter: Adapter | None
    tokenizer: Tokenizer
    timings: RequestTimings = field(default_factory=RequestTimings)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_was_reported: bool = False

    @property
    def finished(self) -> bool:
        return None not in [request.finish_reason for request in self.requests]

    @property
    def num_cached_tokens(self) -> int:
        """How many of the prompt's tokens, as sent, were in the cache when its first answer began."""
        return min(self.requests[0].num_cached_tokens or 0, len(self.prompt_token_ids))

    def uses(self, adapter: Adapter) -> bool:
        """Whether the adapter, or a sum it is part of, computes this."""
        own = self.adapter
        return own is not None and (own is adapter or any(part is adapter for part, _ in own.parts))

    def output(self, *deltas: CompletionOutput) -> RequestOutput:
        """What moved, as callers see it. The prompt's log-probabilities come once, with the first delta."""
        prompt_logprobs = None if self.prompt_was_reported else tuple(self.prompt_logprobs) or None
        self.prompt_was_reported = True
        return RequestOutput(
            request_id=self.job_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=deltas,
            finished=self.finished,
            adapter=None if self.adapter is None else self.adapter.name,
            num_output_tokens=sum([len(request.output_token_ids) for request in self.requests]),
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def delta(
    request: Request, text: str = "", token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] | None = None
) -> CompletionOutput:
    """What is new of one answer."""
    return CompletionOutput(
        index=request.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
