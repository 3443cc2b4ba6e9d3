"""Training LoRA adapters, one or several at once, with the layers that serve them."""

from graftlm.training.job import TrainingJob
from graftlm.training.train import TrainedAdapter, train, train_together

__all__ = ["TrainedAdapter", "TrainingJob", "train", "train_together"]
