"""One answer being generated. Plain data; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graftlm.engine.block_pool import BlockHash
from graftlm.engine.cache_blocks import BlockTable
from graftlm.engine.grammar import Grammar
from graftlm.engine.outputs import FinishReason
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.stage_range import StageRange

# Answers to go on with, by index, and the tokens that each has so far.
Resumption = Mapping[int, Sequence[int]]


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt, what has been generated, and how far the cache has caught up with both.

    request_id: unique among answers; a prompt with n answers is n requests.
    index: which of the n answers this is.
    prompt_token_ids: what is computed before the answer, the adapter's virtual tokens first.
    num_virtual_tokens: how many of those are virtual: nobody sent them, they have no text and are never chosen.
    adapter_digest: which adapter computes it; None is the base. adapter_bytes: memory that adapter's weights take.
    tenant, cache_salt: whose share of a fair schedule it uses up, and with whom it shares cached blocks: see `Tenant`.
    arrival: its number in the order in which requests came to the scheduler.
    cache_factor: block tables it needs for each cache group: more than one where the adapter has more layers than the
        base.
    replicates_layers: whether the adapter has other layers than the base: no part of them alone can be computed again.
    active_from: position from which the adapter is active: 0 but for an activated LoRA. dormant_digest: whose weights
        compute what is before it; None is the base.
    stop_token_ids: ids that end it, the model's own end tokens included.
    grammar: what its output has to look like, from where that has got to on.
    max_tokens: most tokens to generate, resolved against the context.
    num_computed_tokens: how many of its tokens have keys and values in the blocks of
        `block_tables`, `cache_factor` times one for each cache group.
    lost_by: stages that have lost those from `num_replayed_tokens` on, and compute them again before it goes on; None:
        none has.
    block_hashes: of its full blocks, as far as they were needed.
    num_cached_tokens: how many of its tokens were in the cache when it first ran.
    finish_reason: None while it runs. stop_reason: the stop string or id that ended it.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    grammar: Grammar | None = None
    adapter_digest: str | None = None
    adapter_bytes: int = 0
    tenant: str = ""
    cache_salt: str = ""
    arrival: int = 0
    cache_factor: int = 1
    replicates_layers: bool = False
    active_from: int = 0
    dormant_digest: str | None = None
    num_virtual_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    lost_by: StageRange | None = None
    num_replayed_tokens: int = 0
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def sent_token_ids(self) -> tuple[int, ...]:
        """The prompt without its virtual tokens."""
        return self.prompt_token_ids[self.num_virtual_tokens :]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not yet computed: the whole prompt at first, one while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_kept_tokens(self) -> int:
        """How many of its tokens have keys and values in every stage."""
        return self.num_computed_tokens if self.lost_by is None else self.num_replayed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Most tokens still to compute: those that are pending and those that may be generated."""
        return self.num_pending_tokens + self.max_tokens - len(self.output_token_ids)

    @property
    def wants_prompt_logits(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_computed_tokens < len(self.prompt_token_ids)

    def gets_token_at(self, num_computed: int) -> bool:
        """Whether it is to have another token once so many of its tokens are computed."""
        return num_computed == self.num_tokens and self.max_tokens > 0

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens [start, stop) of prompt and output together."""
        prompt_len = len(self.prompt_token_ids)
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        outputs = self.output_token_ids[max(0, start - prompt_len) : stop - prompt_len]
        return (*self.prompt_token_ids[start:], *outputs)
