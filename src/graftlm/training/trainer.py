"""The loop: updates of all jobs, over one base in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import TrainingFailed
from graftlm.models.decoder import Decoder
from graftlm.training.document import Document
from graftlm.training.job_run import JobRun
from graftlm.training.loss import backward, losses
from graftlm.training.packed_batch import Share, num_rows, pack

# Rows up to which documents of several jobs share a forward pass: below, a pass costs mostly the reading of the base's
# weights, which is then done once; above, it costs arithmetic, of which there is no less together.
MIX_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A forward pass's worth of one job's update."""

    run: JobRun
    documents: tuple[Document, ...]
    num_targets: int


class Trainer:
    """Trains jobs side by side. What one does never changes what another learns: a loss is a mean over the job's own
    tokens, and clip, schedule, optimiser and the check for NaN are the job's own too.

    Args:
        recompute_layers: compute each layer again in the backward pass instead of keeping what is in it.
        mix_rows: most rows of several jobs in one forward pass.
    """

    def __init__(self, decoder: Decoder, *, recompute_layers: bool = False, mix_rows: int = MIX_ROWS) -> None:
        self._decoder = decoder
        self._recompute_layers = recompute_layers
        self._mix_rows = mix_rows
        self.runs: list[JobRun] = []

    def add(self, run: JobRun) -> None:
        """Let a job take part from the next update on."""
        self.runs.append(run)

    def step(self) -> list[JobRun]:
        """One update of every job that is running; those jobs."""
        running = [run for run in self.runs if run.state == "running"]
        micro_batches = {run: run.micro_batches() for run in running}
        num_targets = {
            run: sum(len(document.targets) for documents in micro_batches[run] for document in documents)
            for run in running
        }
        sums = {run: torch.zeros((), dtype=torch.float64) for run in running}
        for number in range(max((run.job.accumulate for run in running), default=0)):
            parts = [
                _Part(run=run, documents=micro_batches[run][number], num_targets=num_targets[run])
                for run in running
                if number < run.job.accumulate
            ]
            for together in self._mix(parts):
                for part, loss in zip(together, self._backward(together), strict=True):
                    sums[part.run] += loss
        for run in running:
            run.update(float(sums[run]) / num_targets[run], num_targets[run])
            if run.is_measured():
                run.measure(self.held_out_loss(run))
            try:
                run.record()
            except TrainingFailed as failure:
                run.fail(str(failure))
        return running

    def train(self, *, report: Callable[[JobRun], None], is_stopped: Callable[[], bool]) -> None:
        """Make updates until no job is running, or until `is_stopped`: then every job has a checkpoint.

        Args:
            report: called after each update of a job.

        Raises:
            TrainingFailed: a checkpoint cannot be written.
        """
        while any(run.state == "running" for run in self.runs):
            if is_stopped():
                for run in self.runs:
                    if run.state in ("running", "paused"):
                        run.save()
                return
            for run in self.step():
                report(run)

    def held_out_loss(self, run: JobRun) -> float:
        """Mean over all tokens to be learnt of what the job holds out."""
        with torch.no_grad():
            patch = run.trainable.patch()
        total, count = 0.0, 0
        size = run.job.batch_size
        for start in range(0, len(run.held_out), size):
            share = Share(patch=patch, documents=run.held_out[start : start + size])
            (loss,) = losses(self._decoder, pack([share], self._decoder))
            total += float(loss)
            count += sum(len(document.targets) for document in share.documents)
        return total / count

    def _backward(self, parts: Sequence[_Part]) -> list[Tensor]:
        """Add the parts' gradients to their parameters; the parts' summed losses."""
        shares = [Share(patch=part.run.trainable.patch(), documents=part.documents) for part in parts]
        sums = backward(
            self._decoder,
            pack(shares, self._decoder),
            [part.num_targets for part in parts],
            recompute_layers=self._recompute_layers,
        )
        return [loss.cpu() for loss in sums]

    def _mix(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Parts that share a forward pass, in order: each pass within the limit, unless one part is beyond it alone."""
        passes: list[list[_Part]] = []
        room = 0
        for part in parts:
            rows = sum(num_rows(document) for document in part.documents)
            if rows > room or not passes:
                passes.append([])
                room = self._mix_rows
            passes[-1].append(part)
            room -= rows
        return passes
