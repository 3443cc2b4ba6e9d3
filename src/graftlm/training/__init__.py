"""Training LoRA adapters, one or several at once, with the layers that serve them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.training.job import TrainingJob
    from graftlm.training.training import TrainedAdapter, train, train_together

__all__ = ["TrainedAdapter", "TrainingJob", "train", "train_together"]

_MODULES = {
    "TrainedAdapter": "graftlm.training.training",
    "TrainingJob": "graftlm.training.job",
    "train": "graftlm.training.training",
    "train_together": "graftlm.training.training",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line, which reads a job's options, need not wait seconds for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
