"""An adapter in two parts: what is known of it for as long as a name leads to it, and its weights, which may be in
memory or not. Both are immutable and known by the digest of its files; the name is only a label."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from graftlm.adapters.text import AdapterText
from graftlm.layers.patch import LinearPatch, ModelPatch

# Of a number in bfloat16, in which factors are kept if that loses nothing; in float32 it takes twice as much.
NARROW_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class BoundModule:
    """One module the adapter changes.

    changes: in words, such as ("LoRA", "DoRA"). rank: of its low-rank update, if it has one. scaling: alpha / rank, or
    alpha / sqrt(rank) with rsLoRA.
    """

    path: str
    changes: tuple[str, ...]
    rank: int | None = None
    scaling: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """Everything about an adapter but its weights.

    digest: SHA-256 of config and weights, hexadecimal.
    method: PEFT's name for it, such as "LoRA" or "rsLoRA".
    modules: what it changes, in model order. bound and total count the file's tensors: they are equal, since an
        adapter with a tensor that nothing uses is refused.
    source: the file its weights can be read from again; None for a weighted sum.
    num_bytes: memory its weights take. float32_bytes: what they would take with all low-rank factors in float32.
    changes_dormant: whether it does anything before its invocation tokens (aLoRA).
    is_low_rank: whether all it does is add low-rank updates, so that it may be part of a weighted sum.
    invocation_token_ids: aLoRA's; the adapter is active from the start of their last occurrence in a prompt.
    vocab_size: tokens it knows; None for as many as the base.
    own_token_ids: ids, ascending, of tokens whose embedding rows it brings one by one.
    virtual_token_ids: ids beyond every vocabulary that stand before its prompts (prompt tuning).
    cache_factor: how many times the base's memory in the KV cache a token takes: more than once if the adapter makes
        the stack of layers higher.
    replicates_layers: whether it has other layers than the base. most_repeats: how often the layer that it has most
        often.
    parts: the adapters it is a weighted sum of, with their weights; empty for one that was loaded.
    text: its own tokenizer, chat template and end tokens, if it has any.
    created: unix seconds of loading.
    """

    name: str
    digest: str
    method: str
    modules: tuple[BoundModule, ...]
    source: Path | None
    num_bytes: int
    float32_bytes: int
    changes_dormant: bool
    is_low_rank: bool
    bound: int
    total: int
    created: int
    invocation_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    parts: tuple[tuple[Adapter, float], ...] = ()
    text: AdapterText = field(default_factory=AdapterText)
    own_token_ids: tuple[int, ...] = ()
    virtual_token_ids: tuple[int, ...] = ()
    cache_factor: int = 1
    replicates_layers: bool = False
    most_repeats: int = 1

    @property
    def dormant_digest(self) -> str | None:
        """Stands for what it computes before its invocation; None when that is what the base computes."""
        return f"{self.digest} dormant" if self.changes_dormant else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different ranks among its modules, ascending."""
        return tuple(sorted({module.rank for module in self.modules if module.rank is not None}))


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterWeights:
    """What an adapter does to each layer.

    patch: what it does to the model. dormant_patch: what it does before its invocation tokens (aLoRA); for all others
        the same object.
    """

    patch: ModelPatch
    dormant_patch: ModelPatch

    @property
    def num_bytes(self) -> int:
        """Memory the tensors take. What the two patches share counts twice: a budget must not be passed."""
        dormant = 0 if self.dormant_patch is self.patch else self.dormant_patch.num_bytes
        return self.patch.num_bytes + dormant

    def rounded(self) -> AdapterWeights:
        """With the low-rank factors of linear layers in bfloat16."""
        patch = _rounded(self.patch)
        is_one = self.dormant_patch is self.patch
        return AdapterWeights(patch=patch, dormant_patch=patch if is_one else _rounded(self.dormant_patch))

    @property
    def float32_bytes(self) -> int:
        """As `num_bytes`, with the low-rank factors of linear layers in float32."""
        patches = [self.patch] if self.dormant_patch is self.patch else [self.patch, self.dormant_patch]
        return self.num_bytes + sum(
            factor.nbytes
            for patch in patches
            for linear in (*patch.linears.values(), *([] if patch.head is None else [patch.head.linear]))
            if linear.low_rank is not None
            for factor in linear.low_rank.factors
            if factor.itemsize == NARROW_BYTES
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedAdapter:
    """Both parts, as they come from the files."""

    adapter: Adapter
    weights: AdapterWeights


def _rounded(patch: ModelPatch) -> ModelPatch:
    def linear(patch: LinearPatch) -> LinearPatch:
        return patch if patch.low_rank is None else replace(patch, low_rank=patch.low_rank.rounded())

    return replace(
        patch,
        linears={slot: linear(each) for slot, each in patch.linears.items()},
        head=None if patch.head is None else replace(patch.head, linear=linear(patch.head.linear)),
        stack=None
        if patch.stack is None
        else replace(patch.stack, patches=tuple(_rounded(each) for each in patch.stack.patches)),
    )
