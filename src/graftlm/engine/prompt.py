"""From what a caller sends to a checked job."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import TypedDict

from graftlm.adapters import Adapter, active_from
from graftlm.engine.answer import AnswerText
from graftlm.engine.cache_plan import CachePlan
from graftlm.engine.grammar import Grammar, GrammarCompiler
from graftlm.engine.job import Job
from graftlm.engine.request import Request, Resumption
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.tenant import Tenant
from graftlm.errors import ContextLengthExceeded, InvalidRequest
from graftlm.text import Tokenizer

# No tokenizer in use puts more characters than this in one token; longer texts are refused without tokenising them.
_MAX_CHARACTERS_PER_TOKEN = 128


class TokenIds(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokenIds


class PromptChecker:
    """Tokenises prompts and checks requests against one model, before anything is queued."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, plan: CachePlan, end_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._plan = plan
        self._end_token_ids = end_token_ids
        self._grammars = GrammarCompiler()

    def token_ids(self, prompt: Prompt, adapter: Adapter | None) -> tuple[int, ...]:
        """The prompt's ids, checked: at least one, all in the adapter's vocabulary, and together with the adapter's
        virtual tokens, which are not among them, no more than the context holds.

        Raises:
            InvalidRequest, ContextLengthExceeded
        """
        max_len = self._max_len(adapter)
        if isinstance(prompt, str):
            check_length(prompt, max_len)
            token_ids = tuple(self._tokenizer_of(adapter).encode(prompt))
        elif isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), Iterable):
            token_ids = tuple(prompt["prompt_token_ids"])
        else:
            raise InvalidRequest(
                "this is not a prompt",
                param="prompt",
                got=type(prompt).__name__,
                allowed='a string or {"prompt_token_ids": [...]}',
            )
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt", do="send at least one token")
        virtual = () if adapter is None else adapter.virtual_token_ids
        if len(virtual) + len(token_ids) > max_len:
            raise _too_long(max_len, _prompt_size(len(token_ids), len(virtual)))
        vocab_size = self._vocab_size_of(adapter)
        self._check_token_ids(token_ids, "prompt", vocab_size)
        return token_ids

    def has_grammar(self, params: SamplingParams, adapter: Adapter | None) -> bool:
        """Whether `job` need not compile one."""
        return params.structured is None or self._grammars.is_compiled(
            params.structured,
            self._tokenizer_of(adapter),
            vocab_size=self._vocab_size_of(adapter),
            end_token_ids=self._end_token_ids_of(adapter),
        )

    def grammar(self, params: SamplingParams, adapter: Adapter | None) -> Grammar | None:
        """The beginning of the grammar that an answer has, compiled if it is not known yet.

        Raises:
            InvalidRequest: it cannot be enforced.
        """
        if params.structured is None:
            return None
        return self._grammars.compile(
            params.structured,
            self._tokenizer_of(adapter),
            vocab_size=self._vocab_size_of(adapter),
            end_token_ids=self._end_token_ids_of(adapter),
        )

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: Adapter | None,
        tenant: Tenant | None = None,
        resume: Resumption | None = None,
    ) -> Job:
        """A job ready to run. `adapter` was acquired by the caller.

        Args:
            tenant: on whose account; default: the adapter's, which is "" for the base.
            resume: only these answers are computed, from what they have on; default: all of them from the start.

        Raises:
            InvalidRequest, ContextLengthExceeded
        """
        token_ids = self.token_ids(prompt, adapter)
        vocab_size = self._vocab_size_of(adapter)
        for field in ("logit_bias", "stop_token_ids"):
            self._check_token_ids(getattr(params, field), field, vocab_size)
        virtual = () if adapter is None else adapter.virtual_token_ids
        max_tokens = self._max_tokens(len(token_ids), len(virtual), params, self._max_len(adapter))
        tokenizer = self._tokenizer_of(adapter)
        job_id = uuid.uuid4().hex
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end_token_ids = frozenset() if params.ignore_eos else self._end_token_ids_of(adapter)
        stop_token_ids = frozenset(params.stop_token_ids) | end_token_ids
        start = active_from(token_ids, adapter)
        tenant = tenant or Tenant(name="" if adapter is None else adapter.name)
        requests = tuple(
            Request(
                request_id=f"{job_id}-{index}",
                index=index,
                prompt_token_ids=(*virtual, *token_ids),
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                seed=seed,
                grammar=self.grammar(params, adapter),
                adapter_digest=None if adapter is None else adapter.digest,
                adapter_bytes=0 if adapter is None else adapter.num_bytes,
                tenant=tenant.name,
                cache_salt=tenant.cache_salt,
                cache_factor=1 if adapter is None else adapter.cache_factor,
                replicates_layers=adapter is not None and adapter.replicates_layers,
                active_from=start,
                dormant_digest=None if adapter is None else adapter.dormant_digest,
                num_virtual_tokens=len(virtual),
            )
            for index in range(params.n)
        )
        texts = tuple(AnswerText(request, tokenizer) for request in requests)
        if resume is not None:
            requests = tuple(requests[index] for index in resume)
            for request in requests:
                _resume(request, resume[request.index], texts[request.index])
        return Job(
            job_id=job_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            requests=requests,
            texts=texts,
            adapter=adapter,
            tokenizer=tokenizer,
        )

    def _max_len(self, adapter: Adapter | None) -> int:
        """Tokens of the longest sequence."""
        return self._plan.longest_sequence(1 if adapter is None else adapter.cache_factor)

    def _max_tokens(self, prompt_len: int, num_virtual: int, params: SamplingParams, max_len: int) -> int:
        """Tokens to generate: what was asked for, or what is left of the context."""
        left = max_len - prompt_len - num_virtual
        wanted = left if params.max_tokens is None else params.max_tokens
        if wanted > left or (params.max_tokens is None and left == 0):
            raise _too_long(max_len, f"{_prompt_size(prompt_len, num_virtual)} and {max(wanted, 1)} to generate")
        return wanted

    def _tokenizer_of(self, adapter: Adapter | None) -> Tokenizer:
        own = None if adapter is None else adapter.text.tokenizer
        return self._tokenizer if own is None else own

    def _end_token_ids_of(self, adapter: Adapter | None) -> frozenset[int]:
        """Ids beyond the vocabulary are left out: they are never sampled, and must not reach the logits."""
        own = None if adapter is None else adapter.text.end_token_ids
        ids = self._end_token_ids if own is None else own
        vocabulary = range(self._vocab_size_of(adapter))
        return frozenset(token_id for token_id in ids if token_id in vocabulary)

    def _vocab_size_of(self, adapter: Adapter | None) -> int:
        return self._vocab_size if adapter is None or adapter.vocab_size is None else adapter.vocab_size

    def _check_token_ids(self, token_ids: Collection[object], param: str, vocab_size: int) -> None:
        # Of a million ids only the different ones are looked at.
        are_whole = {*map(type, token_ids)} <= {int}
        for token_id in {*token_ids} if are_whole else token_ids:
            self._check_token_id(token_id, param, vocab_size)

    def _check_token_id(self, token_id: object, param: str, vocab_size: int) -> None:
        valid = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size
        if not valid:
            raise InvalidRequest(
                f"{param} holds something that is not a token id of this model",
                param=param,
                got=repr(token_id),
                allowed=f"integers from 0 to {vocab_size - 1}",
            )


def _resume(request: Request, token_ids: Sequence[int], text: AnswerText) -> None:
    """Bring an answer to where it was: its tokens are known, and its text was told."""
    for token_id in token_ids:
        request.output_token_ids.append(token_id)
        if request.grammar is not None:
            request.grammar.advance(token_id)
        text.push(token_id)


def check_length(text: str, max_len: int) -> None:
    """Refuse a text that, whatever its tokens are, has more than `max_len` of them.

    Raises:
        ContextLengthExceeded
    """
    if len(text) > max_len * _MAX_CHARACTERS_PER_TOKEN:
        raise _too_long(max_len, f"a prompt of {len(text)} characters")


def _too_long(max_len: int, got: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's maximum context length is {max_len} tokens",
        param="prompt",
        got=got,
        do="shorten the prompt or lower max_tokens",
    )


def _prompt_size(num_tokens: int, num_virtual: int) -> str:
    virtual = f", {num_virtual} virtual tokens of its adapter" if num_virtual else ""
    return f"a prompt of {num_tokens} tokens{virtual}"
