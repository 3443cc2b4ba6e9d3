"""A model family: how its config.json becomes a spec, and what its modules are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.spec import ModelSpec, NameMap


@dataclass(frozen=True, kw_only=True)
class Family:
    """names_by_spec: the names, where they differ from one of the family's members to the next."""

    model_type: str
    spec: Callable[[ConfigReader], ModelSpec]
    names: NameMap
    names_by_spec: Callable[[ModelSpec], NameMap] | None = None

    def named_for(self, spec: ModelSpec) -> Family:
        """The family with the names a model of this spec has."""
        return self if self.names_by_spec is None else replace(self, names=self.names_by_spec(spec))
