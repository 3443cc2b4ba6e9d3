"""A model family: how its config.json becomes a spec, and what its modules are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graftlm.models.config_reader import ConfigReader
from graftlm.models.spec import ModelSpec, NameMap


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    spec: Callable[[ConfigReader], ModelSpec]
    names: NameMap
