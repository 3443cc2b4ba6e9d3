"""A loaded adapter: immutable, known by the digest of its files; the name is only a label."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from graftlm.adapters.text import AdapterText
from graftlm.layers.patch import ModelPatch


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
    """What an adapter does to each layer.

    digest: SHA-256 of config and weights, hexadecimal.
    method: PEFT's name for it, such as "LoRA" or "rsLoRA".
    modules: what it changes, in model order. bound and total count the file's tensors: they are equal, since an
        adapter with a tensor that nothing uses is refused.
    source: the file its weights were read from; None for a weighted sum.
    patch: what it does to the model. dormant_patch: what it does before its invocation tokens (aLoRA); for all others
        the same object.
    invocation_token_ids: aLoRA's; the adapter is active from the start of their last occurrence in a prompt.
    vocab_size: tokens it knows; None for as many as the base.
    virtual_token_ids: ids beyond every vocabulary that stand before its prompts (prompt tuning).
    parts: the adapters it is a weighted sum of; empty for one that was loaded.
    text: its own tokenizer, chat template and end tokens, if it has any.
    created: unix seconds of loading.
    """

    name: str
    digest: str
    method: str
    modules: tuple[BoundModule, ...]
    source: Path | None
    patch: ModelPatch
    dormant_patch: ModelPatch
    bound: int
    total: int
    created: int
    invocation_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    parts: tuple[Adapter, ...] = ()
    text: AdapterText = field(default_factory=AdapterText)
    virtual_token_ids: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory its tensors take. What its two patches share counts twice: a budget must not be passed."""
        dormant = 0 if self.dormant_patch is self.patch else self.dormant_patch.num_bytes
        return self.patch.num_bytes + dormant

    @property
    def dormant_digest(self) -> str | None:
        """Stands for what it computes before its invocation; None when that is what the base computes."""
        return f"{self.digest} dormant" if self.dormant_patch.num_bytes else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different ranks among its modules, ascending."""
        return tuple(sorted({module.rank for module in self.modules if module.rank is not None}))
