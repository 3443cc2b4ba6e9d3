"""Configs whose modules have a rank, a scaling, or both, by patterns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.adapters.config_values import first_match, read_number, read_numbers, read_rank, read_ranks
from graftlm.adapters.target_config import ConfigFields, TargetConfig, parse_target_config


@dataclass(frozen=True, kw_only=True)
class RankedConfig(TargetConfig):
    """rank: of modules that no pattern matches. The first pattern that matches wins."""

    rank: int
    rank_pattern: Mapping[str, int]

    def rank_of(self, path: str) -> int:
        return int(first_match(self.rank_pattern, path, self.rank))


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(RankedConfig):
    """alpha: LoRA's alpha, or what stands in its place (DeLoRA's lambda)."""

    alpha: float
    alpha_pattern: Mapping[str, float]

    def scaling_of(self, path: str) -> float:
        """alpha / rank."""
        return first_match(self.alpha_pattern, path, self.alpha) / self.rank_of(path)


def parse_ranked_config(raw: Mapping[str, Any], fields: ConfigFields, *, default_rank: int) -> RankedConfig:
    """`r`, and `rank_pattern` where `fields` declares it.

    Raises:
        AdapterUnsupported, AdapterCorrupt
    """
    return RankedConfig(
        **vars(parse_target_config(raw, fields)),
        rank=read_rank("r", raw.get("r"), default=default_rank),
        rank_pattern=read_ranks(raw, "rank_pattern") if "rank_pattern" in fields.read else {},
    )


def parse_scaled_config(raw: Mapping[str, Any], fields: ConfigFields, *, default_rank: int) -> ScaledConfig:
    """The same with `alpha` and `alpha_pattern`.

    Raises:
        AdapterUnsupported, AdapterCorrupt
    """
    return ScaledConfig(
        **vars(parse_ranked_config(raw, fields, default_rank=default_rank)),
        alpha=read_number("alpha", raw.get("alpha"), default=8.0),
        alpha_pattern=read_numbers(raw, "alpha_pattern"),
    )
