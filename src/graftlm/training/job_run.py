"""One job in progress: its adapter, optimiser and place in the data. Knows nothing of other jobs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from graftlm.errors import TrainingDataError
from graftlm.layers.patch import ModelPatch
from graftlm.models.base_weights import BaseWeights
from graftlm.training.batch_order import BatchOrder
from graftlm.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from graftlm.training.document import Document, Example
from graftlm.training.dropout import Dropout
from graftlm.training.job import TrainingJob
from graftlm.training.metrics_log import MetricsLog
from graftlm.training.objective import objective_of
from graftlm.training.output import CHECKPOINT_NAME, METRICS_NAME, make_folder, save_adapter
from graftlm.training.packed_batch import num_rows
from graftlm.training.schedule import learning_rate
from graftlm.training.start import Start
from graftlm.training.trainable import TrainableAdapter

# Updates in a row without a finite loss and gradient after which a job is given up.
MAX_SKIPPED = 3

State = Literal["running", "paused", "finished", "failed"]


class JobRun:
    """A job, ready for its next update.

    Args:
        examples, held_out: what is learnt from, and what the loss is measured on.

    Raises:
        ConfigurationError: the output folder cannot be made, or holds a checkpoint of other settings.
        AdapterError: the adapter to start from does not fit.
    """

    def __init__(
        self,
        job: TrainingJob,
        start: Start,
        base: BaseWeights,
        examples: tuple[Example, ...],
        held_out: tuple[Example, ...],
        *,
        resume: bool,
    ) -> None:
        self.job = job
        self.objective = objective_of(job)
        self.held_out = held_out
        self.trainable = TrainableAdapter(start, base, seed=job.seed)
        self.step = 0
        # Of the documents of all updates.
        self.num_tokens = 0
        self.state: State = "running"
        self.failure: str | None = None
        self.last_metrics: dict[str, float] = {}
        self._start = start
        self._examples = examples
        self._order = BatchOrder(len(examples), job.batch_size, shuffle=job.shuffle, seed=job.seed)
        self._settings = _settings(job, start, base, examples)
        self._num_skipped = 0
        self._best_loss: float | None = None
        self._num_worse = 0
        self.folder = Path(job.output).expanduser()
        self._optimizer = torch.optim.AdamW(
            list(self.trainable.parameters.values()), lr=job.lr, weight_decay=job.weight_decay, fused=True
        )
        make_folder(self.folder)
        self._log = MetricsLog(self.folder / METRICS_NAME)
        if resume:
            self._resume(load_checkpoint(self.folder, self._settings))

    @property
    def num_steps(self) -> int:
        if self.job.steps is not None:
            return self.job.steps
        return math.ceil(self._order.batches_per_epoch * self.job.epochs / self.job.accumulate)

    @property
    def epochs_left(self) -> int | None:
        """Epochs to come after the last update, if that ended one; an epoch that is cut short counts."""
        per_epoch = self._order.batches_per_epoch
        ended, ended_before = (step * self.job.accumulate // per_epoch for step in (self.step, self.step - 1))
        if ended == ended_before:
            return None
        return math.ceil(self.num_steps * self.job.accumulate / per_epoch) - ended

    def micro_batches(self) -> list[tuple[Document, ...]]:
        """Documents of each forward pass of the next update."""
        first = self.step * self.job.accumulate
        return [
            tuple(document for index in self._order.batch(number) for document in self._examples[index])
            for number in range(first, first + self.job.accumulate)
        ]

    def patch(self, documents: Sequence[Document], first_document: int) -> ModelPatch:
        """What the adapter does in one pass of the next update, differentiable in its parameters.

        Args:
            documents: of the pass. first_document: number of the first of them in the update.
        """
        dropout = None
        if self._start.dropout:
            dropout = Dropout(
                rate=self._start.dropout,
                seed=self.job.seed,
                step=self.step,
                lengths=tuple(num_rows(document) for document in documents),
                num_targets=tuple(len(document.targets) for document in documents),
                first_document=first_document,
            )
        return self.trainable.patch(dropout)

    def update(self, means: Mapping[str, float], documents: Sequence[Document]) -> None:
        """Make an update from the gradients that are there, or skip it if they are not finite.

        Args:
            means: the loss, and what else the objective tells. documents: that they are of.
        """
        parameters = list(self.trainable.parameters.values())
        norm = _clip(parameters, self.job.max_grad_norm)
        lr = learning_rate(self.job, self.step, self.num_steps)
        if math.isfinite(means["loss"]) and math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._num_skipped = 0
        else:
            self._num_skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += sum(len(document.token_ids) for document in documents)
        num_targets = sum(len(document.targets) for document in documents)
        self.last_metrics = {"step": self.step, **means, "tokens": num_targets, "lr": lr, "grad_norm": norm}
        if self._num_skipped == MAX_SKIPPED:
            self.fail(f"loss or gradient were not finite in {MAX_SKIPPED} updates, {self.step} the last")
        elif self.step == self.num_steps:
            self.state = "finished"

    def is_measured(self) -> bool:
        """Whether the loss on what is held out is due."""
        if not self.held_out or self.state == "failed":
            return False
        every = self.job.eval_every
        return self.state == "finished" or (every is not None and self.step % every == 0)

    def measure(self, loss: float) -> None:
        """Take note of the loss on what is held out; end early if it has stopped falling."""
        self.last_metrics["eval_loss"] = loss
        if self._best_loss is None or loss < self._best_loss:
            self._best_loss, self._num_worse = loss, 0
        else:
            self._num_worse += 1
        if self.job.patience and self._num_worse >= self.job.patience:
            self.state = "finished"

    def record(self) -> None:
        """Write down the update that was made: its metrics, a checkpoint if one is due, the adapter at the end."""
        self._log.append(self.last_metrics)
        if self.state == "finished":
            self.save_adapter(self.folder)
            (self.folder / CHECKPOINT_NAME).unlink(missing_ok=True)
        elif self.state == "running" and self.job.save_every and self.step % self.job.save_every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            TrainingFailed: it cannot be written; the one before it is intact.
        """
        save_checkpoint(
            self.folder,
            Checkpoint(
                settings=self._settings,
                step=self.step,
                num_tokens=self.num_tokens,
                parameters={name: tensor.detach() for name, tensor in self.trainable.parameters.items()},
                optimizer=self._optimizer.state_dict(),
                best_loss=self._best_loss,
                num_worse=self._num_worse,
            ),
        )

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as it is now, as the one at the end will be.

        Raises:
            TrainingFailed: it cannot be written.
        """
        make_folder(folder)
        save_adapter(folder, self._start.raw, self.trainable.parameters)

    def pause(self) -> None:
        """Take no part in updates until `go_on`."""
        if self.state == "running":
            self.state = "paused"

    def go_on(self) -> None:
        if self.state == "paused":
            self.state = "running"

    def fail(self, reason: str) -> None:
        self.state, self.failure = "failed", reason

    def _resume(self, checkpoint: Checkpoint) -> None:
        with torch.no_grad():
            for name, parameter in self.trainable.parameters.items():
                parameter.copy_(checkpoint.parameters[name])
        self._optimizer.load_state_dict(dict(checkpoint.optimizer))
        self.step, self.num_tokens = checkpoint.step, checkpoint.num_tokens
        self._best_loss, self._num_worse = checkpoint.best_loss, checkpoint.num_worse
        self._log.rewind(checkpoint.step)


def _clip(parameters: list[Tensor], max_norm: float) -> float:
    """Scale the gradients down to `max_norm`, if that is above 0; their norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if 0 < max_norm < norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def _settings(job: TrainingJob, start: Start, base: BaseWeights, examples: tuple[Example, ...]) -> Mapping[str, Any]:
    """All that an update depends on, and that must not change between a checkpoint and its resumption."""
    if not examples:
        raise TrainingDataError("there are no rows to learn from", got=job.data)
    data = hashlib.sha256()
    for document in (document for example in examples for document in example):
        data.update(json.dumps([document.token_ids, document.targets]).encode())
    free = ("name", "output", "data", "eval_data", "save_every", "init_adapter")
    settings = {name: value for name, value in dataclasses.asdict(job).items() if name not in free}
    adapter = {f"adapter_config.{key}": json.dumps(value) for key, value in start.raw.items()}
    return {**settings, **adapter, "data": data.hexdigest(), "dtype": str(base.dtype)}
