"""A fine-tuning job as clients see it, and its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
ENDED: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class FineTuningJob:
    """Times are seconds since 1970.

    owner: the tenant's name; None without API keys.
    options: of the `TrainingJob` that it is, without its paths. fine_tuned_model: the name the result is served under,
    once it is. error: code, message and param of what ended it.
    """

    id: str
    created_at: int
    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    method: Literal["supervised", "dpo"]
    hyperparameters: Mapping[str, Any]
    metadata: Mapping[str, str] | None
    options: Mapping[str, Any]
    status: Status = "validating_files"
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    error: Mapping[str, Any] | None = field(default=None)
    owner: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI describes it."""
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": self.created_at,
            "error": self.error,
            "estimated_finish": None,
            "fine_tuned_model": self.fine_tuned_model,
            "finished_at": self.finished_at,
            "hyperparameters": self.hyperparameters,
            "integrations": None,
            "metadata": self.metadata,
            "method": {"type": self.method, self.method: {"hyperparameters": self.hyperparameters}},
            "model": self.model,
            "organization_id": "graft",
            "result_files": [],
            "seed": self.options["seed"],
            "status": self.status,
            "trained_tokens": self.trained_tokens,
            "training_file": self.training_file,
            "user_provided_suffix": self.suffix,
            "validation_file": self.validation_file,
        }


@dataclass(frozen=True, kw_only=True)
class JobCheckpoint:
    """The adapter as it was after a step. model: the name it is served under. metrics: of that step, as an event's."""

    created_at: int
    job_id: str
    step: int
    model: str
    metrics: Mapping[str, Any]

    @property
    def id(self) -> str:
        return f"ftckpt_{self.job_id.removeprefix('ftjob-')}-{self.step}"

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI describes it. What is measured is measured on all of the validation file."""
        metrics = {"step": self.step, "train_loss": self.metrics["train_loss"]}
        if (loss := self.metrics.get("valid_loss")) is not None:
            metrics |= {"valid_loss": loss, "full_valid_loss": loss}
        return {
            "id": self.id,
            "object": "fine_tuning.job.checkpoint",
            "created_at": self.created_at,
            "fine_tuned_model_checkpoint": self.model,
            "fine_tuning_job_id": self.job_id,
            "metrics": metrics,
            "step_number": self.step,
        }


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """data: of an update, its metrics."""

    id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    data: Mapping[str, Any] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI describes it."""
        return {
            "id": self.id,
            "object": "fine_tuning.job.event",
            "created_at": self.created_at,
            "level": self.level,
            "message": self.message,
            "type": "message" if self.data is None else "metrics",
            "data": self.data,
        }
