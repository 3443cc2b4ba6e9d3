"""Training beside serving, in one process over one base: passes between the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from graftlm.errors import TrainingFailed
from graftlm.models.decoder import Decoder
from graftlm.training.job_run import JobRun
from graftlm.training.pace import Pace
from graftlm.training.trainer import Trainer

logger = logging.getLogger(__name__)


class BackgroundTrainer:
    """Jobs that are trained when the engine has nothing to do, and between its steps as far as a pass fits into
    `max_pause_seconds`: requests then wait no longer than that for their next token.

    wake: lets the engine's thread look for work; to be called when a job that was paused goes on.

    The engine's thread makes the passes; jobs may be added and ended from any thread.
    """

    def __init__(self, decoder: Decoder, *, max_pause_seconds: float, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._pace = Pace(max_pause_seconds)
        self._trainer = Trainer(decoder, pace=self._pace)
        self._reports: dict[JobRun, Callable[[JobRun], None]] = {}
        self._update: Generator[int, None, list[JobRun]] | None = None
        # Rows of the pass that comes next.
        self._num_rows = 0

    @property
    def has_work(self) -> bool:
        return self._update is not None or any(run.state == "running" for run in self._trainer.runs)

    def add(self, run: JobRun, report: Callable[[JobRun], None]) -> None:
        """Let a job take part from the next update on.

        Args:
            report: called in the engine's thread after each update, and if the job fails.
        """
        self._reports[run] = report
        self._trainer.add(run)
        self.wake()

    def step(self, *, is_serving: bool) -> None:
        """One pass, if there is one and it fits.

        Args:
            is_serving: requests are waiting for it to end.
        """
        try:
            if self._update is None:
                self._update = self._trainer.update()
                self._advance()
            elif not is_serving or self._pace.fits(self._num_rows):
                self._advance()
        except Exception as cause:
            # Whose pass it was nobody knows any more; the engine, and jobs that come later, are not concerned.
            logger.exception("a training pass failed; the jobs in it are given up")
            self._update = None
            for run in self._trainer.runs:
                if run.state == "running":
                    run.fail(f"a training pass failed: {cause}"[:300])
                    self._reports[run](run)
            self._forget_ended()

    def save(self) -> None:
        """Write checkpoints of what has not ended. Not while the engine's thread runs."""
        for run in self._trainer.runs:
            if run.state in ("running", "paused"):
                try:
                    run.save()
                except TrainingFailed as failure:
                    logger.error("%s: %s", run.job.label, failure)

    def _advance(self) -> None:
        if self._update is None:
            return
        try:
            self._num_rows = next(self._update)
        except StopIteration as end:
            self._update = None
            for run in end.value:
                self._reports[run](run)
            self._forget_ended()

    def _forget_ended(self) -> None:
        for run in [run for run in self._trainer.runs if run.state in ("finished", "failed")]:
            self._trainer.runs.remove(run)
            del self._reports[run]
