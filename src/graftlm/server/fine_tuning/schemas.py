"""What the routes of fine-tuning accept. A field that is not listed is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Factor = Annotated[float, Field(gt=0, le=1e6)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Hyperparameters(_Strict):
    """learning_rate_multiplier: of the default learning rate, 2e-4."""

    n_epochs: Auto | Count | None = None
    batch_size: Auto | Count | None = None
    learning_rate_multiplier: Auto | Factor | None = None


class PreferenceHyperparameters(Hyperparameters):
    beta: Auto | Factor | None = None


class Supervised(_Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class Preference(_Strict):
    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class Method(_Strict):
    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Preference | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        if self.type == "dpo":
            return (self.dpo or Preference()).hyperparameters
        return (self.supervised or Supervised()).hyperparameters


class CreateJobRequest(_Strict):
    """training: options of `TrainingJob` beyond OpenAI's (rank, target_modules and so on)."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    metadata: dict[str, str] | None = None
    integrations: None = None
    training: dict[str, Any] | None = None
