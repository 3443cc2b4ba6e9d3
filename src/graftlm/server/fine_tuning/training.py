"""All that a server trains beside its requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftlm.engine.async_llm import AsyncLLM
from graftlm.server.fine_tuning.service import FineTuningService
from graftlm.training.background import BackgroundTrainer
from graftlm.training.job_file import read_job_file
from graftlm.training.train_beside import train_beside


class Training:
    """Jobs of clients, below a folder, and jobs of TOML files, in one trainer; nothing, if there is neither.

    service: answers the clients.

    Args:
        max_pause_seconds: that a request waits for a pass of training, about.

    Raises:
        ConfigurationError, AdapterError, TrainingDataError: a file's job cannot run, or the folder cannot be used.
    """

    def __init__(
        self, llm: AsyncLLM, folder: Path | None, job_files: Sequence[str], *, max_pause_seconds: float
    ) -> None:
        self._trainer: BackgroundTrainer | None = None
        self.service: FineTuningService | None = None
        if folder is None and not job_files:
            return
        self._trainer = BackgroundTrainer(llm.whole_base.decoder, max_pause_seconds=max_pause_seconds, wake=llm.wake)
        llm.do_beside(self._trainer)
        if job_files:
            train_beside(llm, self._trainer, [read_job_file(file, {}) for file in job_files])
        if folder is not None:
            self.service = FineTuningService(llm, self._trainer, folder)

    def close(self) -> None:
        """Write checkpoints of what has not ended. After the engine was shut down."""
        if self.service is not None:
            self.service.close()
        if self._trainer is not None:
            self._trainer.save()
