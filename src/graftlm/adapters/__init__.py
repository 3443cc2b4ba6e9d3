"""PEFT adapters: reading them strictly, compiling them to patches, keeping the loaded ones by name."""

from graftlm.adapters.activation import active_from
from graftlm.adapters.adapter import Adapter, AdapterWeights, BoundModule, LoadedAdapter
from graftlm.adapters.folder import AdapterFolder
from graftlm.adapters.load import load_adapter, read_weights
from graftlm.adapters.registry import AdapterRegistry
from graftlm.adapters.weighted import AdapterChoice, choice_name

__all__ = [
    "Adapter",
    "AdapterChoice",
    "AdapterFolder",
    "AdapterRegistry",
    "AdapterWeights",
    "BoundModule",
    "LoadedAdapter",
    "active_from",
    "choice_name",
    "load_adapter",
    "read_weights",
]
