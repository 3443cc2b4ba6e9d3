"""Rotary positions as plain, hashable data: layers with equal specs share one table of angles."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.models.length_regimes import LengthRegimes


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """Each frequency divided by its own factor, as GGUF stores Llama 3's."""

    factors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1's rule)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Frequencies that turn fewer than `beta_slow` times in the original context divided by `factor`, those that turn
    more than `beta_fast` times kept, a ramp between (YaRN). truncate: the ramp's ends are whole dimensions."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Theta that grows with the length at which a token was computed, beyond the original context (dynamic NTK).

    A prompt's tokens are computed at the length of the prompt, each later one at its own position plus one.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Each frequency divided by its own factor: the long ones in sequences beyond the original context, the short ones
    in all others (LongRoPE). A sequence that grows beyond is computed anew."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int


RopeScaling = LinearScaling | FrequencyFactors | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary frequencies: theta over the first `dims` dimensions of a head, scaled by one of the known rules.

    attention_factor: scales cosines and sines, and so the scores by its square.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0

    @property
    def length_regimes(self) -> LengthRegimes:
        """Lengths that change how a sequence is computed."""
        match self.scaling:
            case LongRopeScaling(original_max_position_embeddings=context):
                return LengthRegimes(sequence_lens=frozenset({context}))
            case DynamicScaling(original_max_position_embeddings=context):
                return LengthRegimes(prompt_lens=frozenset({context}))
            case _:
                return LengthRegimes()

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens of the longest sequence. The config of a model with dynamic scaling, and of many with YaRN, says only
        how long it was without."""
        if isinstance(self.scaling, DynamicScaling | YarnScaling):
            stretched = int(self.scaling.original_max_position_embeddings * self.scaling.factor)
            return max(max_position_embeddings, stretched)
        return max_position_embeddings
