"""How weights are stored and applied. Generic code calls a `Weight` and never asks for its format."""

from graftlm.quantization.dense import DenseWeight
from graftlm.quantization.stacked import StackedWeight
from graftlm.quantization.weight import Weight

__all__ = ["DenseWeight", "StackedWeight", "Weight"]
