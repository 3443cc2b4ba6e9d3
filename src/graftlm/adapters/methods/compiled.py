"""What a method hands back."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.adapters.patch_builder import PatchBuilder


@dataclass(frozen=True, kw_only=True)
class CompiledAdapter:
    """A method's changes, collected.

    method: the name people see. dormant: what the adapter does before its invocation tokens, if that is another thing.
    vocab_size: tokens the adapter knows, if they are not the base's. virtual_token_ids: rows of its embedding, beyond
        the vocabulary, that stand before every prompt.
    """

    method: str
    builder: PatchBuilder
    dormant: PatchBuilder | None = None
    invocation_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    virtual_token_ids: tuple[int, ...] = ()
