"""Runs fine-tuning jobs beside the requests, and serves what they make."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.exceptions import HTTPException

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.background_thread import background_thread
from graftlm.errors import ConfigurationError, GraftError, InvalidRequest, ObjectNotFound
from graftlm.server.callers import Caller
from graftlm.server.fine_tuning.file_store import FileStore
from graftlm.server.fine_tuning.job import ENDED, FineTuningJob, JobCheckpoint
from graftlm.server.fine_tuning.job_store import JobStore
from graftlm.server.fine_tuning.schemas import CreateJobRequest, Hyperparameters, Method, PreferenceHyperparameters
from graftlm.training.background import BackgroundTrainer
from graftlm.training.job import TrainingJob, make_job
from graftlm.training.job_run import JobRun
from graftlm.training.output import CHECKPOINT_NAME
from graftlm.training.training import prepare_job, start_run

logger = logging.getLogger(__name__)

DEFAULT_EPOCHS, DEFAULT_BATCH_SIZE = 3, 8
# Jobs that are trained at a time; the others are queued.
MAX_RUNNING = 4
# As many epochs of a job, counted from its end, end with a checkpoint; the last is the result.
CHECKPOINTED_EPOCHS = 3
# Options that a job gets from elsewhere.
_RESERVED = frozenset({"data", "output", "name", "eval_data", "init_adapter", "objective", "seed"})


class FineTuningService:
    """Jobs below a folder. Any thread may ask; one thread of its own prepares jobs and loads what they have made.

    Jobs that had not ended when the server did go on: from their checkpoint, or from the beginning.

    Raises:
        ConfigurationError: the model is not in this process, or the folder cannot be written to.
    """

    def __init__(self, llm: AsyncLLM, trainer: BackgroundTrainer, folder: Path) -> None:
        self._llm = llm
        self._base = llm.whole_base
        self._trainer = trainer
        try:
            self.files = FileStore(folder / "files")
            self.jobs = JobStore(folder / "jobs")
        except OSError as cause:
            raise ConfigurationError("the fine-tuning folder cannot be used", got=str(cause)[:200]) from cause
        self._thread = background_thread("graft-fine-tuning")
        self._lock = Lock()
        self._runs: dict[str, JobRun] = {}
        for job in reversed(self.jobs.newest_first()):
            self._thread.submit(self._serve_again, job.id)
            if job.status not in ENDED:
                self._thread.submit(self._start, job.id)

    def create(self, request: CreateJobRequest, caller: Caller) -> FineTuningJob:
        """Accept a job. Its data are read afterwards: what is wrong with them makes it fail.

        Raises:
            InvalidRequest: an option cannot be met, or there is no such file or model.
            HTTPException: 403, the result would have a name that is not the caller's to use.
        """
        for name in ("training_file", "validation_file"):
            if (file_id := getattr(request, name)) is not None:
                self._check_file(file_id, name, caller)
        method = request.method or Method(type="supervised")
        if request.hyperparameters is not None and request.method is not None:
            raise InvalidRequest("hyperparameters belong into method", param="hyperparameters", do="leave one out")
        asked = request.hyperparameters or method.hyperparameters
        job = FineTuningJob(
            id=f"ftjob-{secrets.token_hex(12)}",
            created_at=int(time.time()),
            model=request.model,
            training_file=request.training_file,
            validation_file=request.validation_file,
            suffix=request.suffix,
            method=method.type,
            hyperparameters=_resolved(asked),
            metadata=request.metadata,
            options=self._options(request, method, asked),
            owner=caller.name,
        )
        if not caller.may_use(name := self._name_of(job)):
            raise HTTPException(403, f"this API key may not use {name}; do: let its models allow names with ft-")
        self.jobs.add(job)
        self.jobs.tell(job.id, f"Created fine-tuning job: {job.id}")
        self.jobs.tell(job.id, f"Validating training file: {job.training_file}")
        self._thread.submit(self._start, job.id)
        return job

    def cancel(self, job_id: str) -> FineTuningJob:
        """End a job. One that has ended already stays as it is.

        Raises:
            ObjectNotFound
            InvalidRequest: it has ended otherwise.
        """
        with self._lock:
            job = self.jobs.get(job_id)
            if job.status in ENDED:
                raise InvalidRequest(f"the job has ended: {job.status}", param="fine_tuning_job_id", got=job_id)
            if (run := self._runs.pop(job_id, None)) is not None:
                run.fail("cancelled")
            job = self.jobs.change(job_id, status="cancelled", finished_at=int(time.time()))
        self.jobs.tell(job_id, "The job was cancelled")
        self._thread.submit(self._start_queued)
        return job

    def pause(self, job_id: str) -> FineTuningJob:
        """Let a running job take no part until `resume`.

        Raises:
            ObjectNotFound
            InvalidRequest: it does not run.
        """
        return self._switch(job_id, "running", "paused")

    def resume(self, job_id: str) -> FineTuningJob:
        """Let a paused job go on.

        Raises:
            ObjectNotFound
            InvalidRequest: it is not paused.
        """
        return self._switch(job_id, "paused", "running")

    def close(self) -> None:
        """Stop preparing jobs. What runs is saved by the trainer."""
        self._thread.shutdown(cancel_futures=True)

    def _switch(self, job_id: str, before: str, after: str) -> FineTuningJob:
        with self._lock:
            job, run = self.jobs.get(job_id), self._runs.get(job_id)
            if job.status != before or run is None:
                raise InvalidRequest(f"the job is not {before}", param="fine_tuning_job_id", got=job.status)
            if after == "paused":
                run.pause()
            else:
                run.go_on()
            job = self.jobs.change(job_id, status=after)
        self._trainer.wake()
        return job

    def _check_file(self, file_id: str, param: str, caller: Caller) -> None:
        try:
            self.files.get(file_id, caller.owns)
        except ObjectNotFound as error:
            raise InvalidRequest("no such file", param=param, got=file_id, do="upload it to /v1/files") from error

    def _options(self, request: CreateJobRequest, method: Method, asked: Hyperparameters) -> dict[str, Any]:
        """Those of the training job; checked here, so that nothing that cannot be met is accepted."""
        extra = request.training or {}
        if reserved := sorted(_RESERVED & extra.keys()):
            raise InvalidRequest(
                "training holds what the job says elsewhere", param="training", got=", ".join(reserved)
            )
        resolved = _resolved(asked)
        options: dict[str, Any] = {
            "objective": "dpo" if method.type == "dpo" else "sft",
            "seed": request.seed or 0,
            "epochs": resolved["n_epochs"],
            "batch_size": resolved["batch_size"],
            "lr": TrainingJob.lr * resolved["learning_rate_multiplier"],
            **({"beta": resolved["beta"]} if "beta" in resolved else {}),
            **extra,
        }
        if (start := self._start_of(request.model)) is not None:
            options["init_adapter"] = start
        try:
            make_job({**options, "data": "unread", "output": "unwritten"})
        except ConfigurationError as error:
            raise InvalidRequest(error.what, param="training", got=error.got, allowed=error.allowed) from error
        return options

    def _start_of(self, model: str) -> str | None:
        """The adapter to start from; None for none.

        Raises:
            InvalidRequest: it is neither the base nor what another job has made.
        """
        if model == self._llm.model_name:
            return None
        for job in self.jobs.newest_first():
            if (folder := self._served_from(job).get(model)) is not None:
                return str(folder)
        raise InvalidRequest(
            "this model cannot be fine-tuned",
            param="model",
            got=model,
            allowed=f"{self._llm.model_name}, or what a job has made",
        )

    def _start(self, job_id: str) -> None:
        """Read a job's data and let it run, if there is room."""
        job = self.jobs.get(job_id)
        if job.status in ENDED or job_id in self._runs:
            return
        if len(self._runs) >= MAX_RUNNING:
            self.jobs.change(job_id, status="queued")
            return
        output = self.jobs.output(job_id)
        resume = (output / CHECKPOINT_NAME).is_file()
        try:
            run = self._make_run(job, output, resume=resume)
        except GraftError as error:
            self._fail(job_id, self._without_paths(job_id, error), code="invalid_training_file")
            return
        except OSError:
            logger.exception("fine-tuning job %s cannot begin", job_id)
            self._fail(job_id, "the server failed; its log has the cause", code="server_error")
            return
        with self._lock:
            if self.jobs.get(job_id).status in ENDED:
                return
            self._runs[job_id] = run
            if job.status == "paused":
                run.pause()
            else:
                self.jobs.change(job_id, status="running")
        self.jobs.tell(job_id, f"Fine-tuning goes on from step {run.step}" if resume else "Fine-tuning job started")
        self._trainer.add(run, lambda run: self._on_update(job_id, run))

    def _without_paths(self, job_id: str, error: GraftError) -> str:
        """An error's message that calls files as their owner does, not by where the server keeps them."""
        job, message = self.jobs.get(job_id), str(error)
        for file_id in filter(None, (job.training_file, job.validation_file)):
            # Deleted meanwhile, it cannot have been read.
            with suppress(ObjectNotFound):
                message = message.replace(str(self.files.path(file_id)), self.files.get(file_id).filename)
        return message.replace(str(self.jobs.output(job_id).parent), job_id)

    def _make_run(self, job: FineTuningJob, output: Path, *, resume: bool) -> JobRun:
        if not resume:
            shutil.rmtree(output, ignore_errors=True)
        settings = {**job.options, "data": self.files.path(job.training_file), "output": output, "name": job.id}
        if job.validation_file is not None:
            settings["eval_data"] = self.files.path(job.validation_file)
        prepared = prepare_job(make_job(settings), self._base, self._llm.model_name)
        if (num_long := prepared.data.num_long) and not resume:
            self.jobs.tell(job.id, f"Rows longer than max_length, which were cut: {num_long}", level="warn")
        return start_run(prepared, self._base, resume=resume)

    def _on_update(self, job_id: str, run: JobRun) -> None:
        """In the engine's thread, which has requests to serve: nothing here may take long."""
        with self._lock:
            if self.jobs.get(job_id).status in ENDED:
                return
            if run.state == "failed":
                self._runs.pop(job_id, None)
        if run.state == "failed":
            self._fail(job_id, run.failure or "training failed", code="training_failed")
            return
        data = _event_data(run)
        message = f"Step {run.step}/{run.num_steps}: training loss={data['train_loss']:.4f}"
        self.jobs.tell(job_id, message, data=data)
        if run.state == "finished":
            self._thread.submit(self._succeed, job_id, run.num_tokens, data)
        elif (left := run.epochs_left) is not None and left < CHECKPOINTED_EPOCHS:
            self._save_checkpoint(job_id, run, data)

    def _save_checkpoint(self, job_id: str, run: JobRun, data: Mapping[str, Any]) -> None:
        """In the engine's thread: the next update changes what is written."""
        try:
            run.save_adapter(self.jobs.checkpoint_output(job_id, run.step))
        except GraftError as error:
            self.jobs.tell(
                job_id, f"No checkpoint at step {run.step}: {self._without_paths(job_id, error)}", level="warn"
            )
        else:
            self._thread.submit(self._serve_checkpoint, job_id, run.step, data)

    def _serve_checkpoint(self, job_id: str, step: int, data: Mapping[str, Any]) -> None:
        name = f"{self._name_of(self.jobs.get(job_id))}-ckpt-step-{step}"
        try:
            self._load(name, self.jobs.checkpoint_output(job_id, step))
        except GraftError as error:
            self.jobs.tell(
                job_id,
                f"The checkpoint at step {step} cannot be served: {self._without_paths(job_id, error)}",
                level="warn",
            )
        else:
            self._add_checkpoint(job_id, step, name, data)

    def _add_checkpoint(self, job_id: str, step: int, name: str, data: Mapping[str, Any]) -> None:
        created_at = int(time.time())
        self.jobs.add_checkpoint(
            JobCheckpoint(created_at=created_at, job_id=job_id, step=step, model=name, metrics=data)
        )
        self.jobs.tell(job_id, f"Checkpoint created at step {step}")

    def _succeed(self, job_id: str, num_tokens: int, data: Mapping[str, Any]) -> None:
        with self._lock:
            self._runs.pop(job_id, None)
        name = self._name_of(self.jobs.get(job_id))
        try:
            self._load(name, self.jobs.output(job_id))
        except GraftError as error:
            self._fail(
                job_id, f"the result cannot be served: {self._without_paths(job_id, error)}", code="adapter_invalid"
            )
            return
        self._add_checkpoint(job_id, data["step"], name, data)
        self.jobs.tell(job_id, f"New fine-tuned model created: {name}")
        self.jobs.change(
            job_id,
            status="succeeded",
            finished_at=int(time.time()),
            trained_tokens=num_tokens,
            fine_tuned_model=name,
        )
        self.jobs.tell(job_id, "The job has successfully completed")
        self._start_queued()

    def _load(self, name: str, folder: Path) -> None:
        """Raises: AdapterError"""
        # Loading waits on nothing of any loop's but a thread of the engine's.
        asyncio.run(self._llm.load_adapter(name, folder, replace=True))

    def _served_from(self, job: FineTuningJob) -> dict[str, Path]:
        """What a job has made, by the names it is served under: its checkpoints and, if it is done, its result."""
        found = {item.model: self.jobs.checkpoint_output(job.id, item.step) for item in self.jobs.checkpoints(job.id)}
        if job.fine_tuned_model is not None:
            found[job.fine_tuned_model] = self.jobs.output(job.id)
        return found

    def _serve_again(self, job_id: str) -> None:
        """After a restart. What was made stays made, even if this server cannot serve it."""
        for name, folder in self._served_from(self.jobs.get(job_id)).items():
            try:
                self._load(name, folder)
            except GraftError as error:
                logger.error("%s: %s cannot be served: %s", job_id, name, error)

    def _start_queued(self) -> None:
        for job in reversed(self.jobs.newest_first()):
            if job.status == "queued":
                self._start(job.id)

    def _fail(self, job_id: str, message: str, *, code: str) -> None:
        error: Mapping[str, Any] = {"code": code, "message": message, "param": None}
        self.jobs.change(job_id, status="failed", finished_at=int(time.time()), error=error)
        self.jobs.tell(job_id, message, level="error")
        self._thread.submit(self._start_queued)

    def _name_of(self, job: FineTuningJob) -> str:
        """OpenAI's scheme with a dash for its colon, which stands for weights here."""
        parts = ("ft", self._llm.model_name.rpartition("/")[2], job.suffix or "graft", job.id[-8:])
        return "-".join(re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "_", part)[:40] for part in parts)


def _event_data(run: JobRun) -> dict[str, Any]:
    """An update's metrics as OpenAI's events have them."""
    metrics = run.last_metrics
    return {
        "step": run.step,
        "total_steps": run.num_steps,
        "train_loss": metrics["loss"],
        **({"valid_loss": metrics["eval_loss"]} if "eval_loss" in metrics else {}),
        **({"train_accuracy": metrics["accuracy"]} if "accuracy" in metrics else {}),
    }


def _resolved(asked: Hyperparameters) -> dict[str, Any]:
    """Hyperparameters with numbers in the place of "auto"."""
    defaults: dict[str, Any] = {
        "n_epochs": DEFAULT_EPOCHS,
        "batch_size": DEFAULT_BATCH_SIZE,
        "learning_rate_multiplier": 1.0,
    }
    if isinstance(asked, PreferenceHyperparameters):
        defaults["beta"] = TrainingJob.beta
    values = asked.model_dump()
    return {name: default if values[name] in (None, "auto") else values[name] for name, default in defaults.items()}
