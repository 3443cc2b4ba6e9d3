"""A loaded adapter: immutable, known by the digest of its files; the name is only a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graftlm.layers.patch import LinearPatch, Slot


@dataclass(frozen=True, kw_only=True)
class BoundModule:
    """One module the adapter changes. scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""

    path: str
    rank: int
    scaling: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """What an adapter does to each layer.

    digest: SHA-256 of config and weights, hexadecimal.
    method: PEFT's name for it, such as "LoRA" or "rsLoRA".
    modules: what it changes, in model order. bound and total count the file's tensors: they are equal, since an
        adapter with a tensor that nothing uses is refused.
    created: unix seconds of loading.
    """

    name: str
    digest: str
    method: str
    modules: tuple[BoundModule, ...]
    patches: Mapping[Slot, LinearPatch]
    bound: int
    total: int
    created: int

    @property
    def num_bytes(self) -> int:
        """Memory its tensors take."""
        return sum(patch.num_bytes for patch in self.patches.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different ranks among its modules, ascending."""
        return tuple(sorted({module.rank for module in self.modules}))
