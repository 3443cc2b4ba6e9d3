"""Lengths that change how a sequence is computed, besides the position of each token. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Two sequences with the same beginning have the same keys and values there only if they are in the same regime.
Regime = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LengthRegimes:
    """sequence_lens: beyond each of these lengths a sequence is computed in another way, all of it.
    prompt_lens: beyond one of these lengths, how a prompt is computed depends on how long it is."""

    sequence_lens: frozenset[int] = frozenset()
    prompt_lens: frozenset[int] = frozenset()

    @staticmethod
    def union(regimes: Iterable[LengthRegimes]) -> LengthRegimes:
        """All lengths of all."""
        listed = list(regimes)
        return LengthRegimes(
            sequence_lens=frozenset().union(*(regime.sequence_lens for regime in listed)),
            prompt_lens=frozenset().union(*(regime.prompt_lens for regime in listed)),
        )

    def regime(self, *, prompt_len: int, sequence_len: int) -> Regime:
        """What a sequence of `sequence_len` tokens, of which `prompt_len` are the prompt, is computed under."""
        passed = sum(sequence_len > limit for limit in self.sequence_lens)
        return passed, prompt_len if any(prompt_len > limit for limit in self.prompt_lens) else 0

    def ends_at(self, sequence_len: int) -> bool:
        """Whether a sequence of this many tokens is in another regime with one more."""
        return sequence_len in self.sequence_lens
