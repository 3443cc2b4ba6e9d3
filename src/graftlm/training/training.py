"""Training from Python: what `graft train` does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.config import DType, EngineConfig, Quantization
from graftlm.engine.base import Base, load_base
from graftlm.engine.load_options import choose_device
from graftlm.engine.memory import return_free_memory
from graftlm.errors import ConfigurationError, TrainingFailed
from graftlm.kernels.registry import choose_training_kernels
from graftlm.models.base_weights import DecoderWeights
from graftlm.models.heap import map_large_tensors
from graftlm.training.batch_order import permutation
from graftlm.training.document import Document, Example
from graftlm.training.documents import Documents, load_documents
from graftlm.training.job import TrainingJob, make_job
from graftlm.training.job_run import JobRun
from graftlm.training.metrics_log import MetricsLog
from graftlm.training.output import METRICS_NAME, check_folder, is_finished
from graftlm.training.start import Start, choose_start
from graftlm.training.trainer import Trainer

logger = logging.getLogger(__name__)

DEFAULT_MAX_LENGTH = 1024
# Of `permutation`: apart from every epoch's.
_HELD_OUT_STREAM = -1


@dataclass(frozen=True, kw_only=True)
class TrainedAdapter:
    """What became of a job.

    folder: a PEFT folder, if the job finished. step: updates made. metrics: of the last.
    """

    name: str
    folder: Path
    step: int
    finished: bool
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job whose data were read and checked.

    examples: what is learnt from. held_out: of the data or of `eval_data`.
    """

    job: TrainingJob
    start: Start
    data: Documents
    examples: tuple[Example, ...]
    held_out: tuple[Example, ...]

    @property
    def documents(self) -> tuple[Document, ...]:
        """Of the examples, in order."""
        return tuple(document for example in self.examples for document in example)


def train(
    model: str | Path,
    *,
    dtype: DType = "auto",
    quantization: Quantization | None = None,
    device: str = "auto",
    gradient_checkpointing: bool = False,
    resume: bool = False,
    **job: Any,
) -> TrainedAdapter:
    """Train one adapter; `job` are the options of `TrainingJob`.

    Raises:
        ConfigurationError, CheckpointError, AdapterError, TrainingDataError: before anything is written.
        TrainingFailed: the job cannot go on.
    """
    config = EngineConfig(model=model, dtype=dtype, quantization=quantization, device=device)
    return train_together(config, [make_job(job)], gradient_checkpointing=gradient_checkpointing, resume=resume)[0]


def train_together(
    config: EngineConfig,
    jobs: Sequence[TrainingJob],
    *,
    gradient_checkpointing: bool = False,
    resume: bool = False,
    report: Callable[[JobRun], None] = lambda run: None,
    is_stopped: Callable[[], bool] = lambda: False,
    conclude: Callable[[TrainedAdapter], None] = lambda adapter: None,
) -> list[TrainedAdapter]:
    """Train several adapters over one base in memory; each becomes what it would have become alone.

    Args:
        config: the base, its dtype, quantisation and device.
        gradient_checkpointing: compute each layer again in the backward pass, and give every tensor's memory back to
            the system at once, from now on and in the whole process: less memory, and half as much time again or more.
        resume: go on from the checkpoints in the jobs' output folders. Jobs that have finished stay as they are, unless
            all have.
        report: called after each update of a job. is_stopped: asked between updates; true saves checkpoints and ends.
        conclude: called in the end with each adapter that is returned, also when other jobs have failed.

    Raises:
        ConfigurationError, CheckpointError, AdapterError, TrainingDataError: before anything is written.
        TrainingFailed: jobs cannot go on; the others have finished.
    """
    check_distinct(jobs)
    done = _finished_before(jobs) if resume else {}
    left = [job for job in jobs if job not in done]
    check_outputs(left, resume=resume)
    if gradient_checkpointing:
        map_large_tensors()
    base = load_frozen_base(config)
    prepared = [prepare_job(job, base, str(config.model)) for job in left]
    # What loading took and gave back is the heap's until it is told.
    return_free_memory()
    trainer = Trainer(base.decoder, recompute_layers=gradient_checkpointing)
    for item in prepared:
        trainer.add(start_run(item, base, resume=resume))
    trainer.train(report=report, is_stopped=is_stopped)
    trained = list(done.values())
    trained += [
        TrainedAdapter(
            name=run.job.label,
            folder=run.folder,
            step=run.step,
            finished=run.state == "finished",
            metrics=run.last_metrics,
        )
        for run in trainer.runs
        if run.state != "failed"
    ]
    for adapter in trained:
        conclude(adapter)
    if failed := [f"{run.job.label}: {run.failure}" for run in trainer.runs if run.state == "failed"]:
        raise TrainingFailed("training failed", got="; ".join(failed))
    return trained


def _finished_before(jobs: Sequence[TrainingJob]) -> dict[TrainingJob, TrainedAdapter]:
    """Jobs that were through when a run of several was stopped; none if all are: then nothing is there to resume."""
    done: dict[TrainingJob, TrainedAdapter] = {}
    for job in jobs:
        folder = Path(job.output).expanduser()
        if is_finished(folder):
            metrics = MetricsLog(folder / METRICS_NAME).last()
            step = int(metrics.get("step", 0))
            done[job] = TrainedAdapter(name=job.label, folder=folder, step=step, finished=True, metrics=metrics)
    if len(done) == len(jobs):
        return {}
    for job in done:
        logger.warning("%s: finished before, and stays as it is", job.label)
    return done


def load_frozen_base(config: EngineConfig) -> Base:
    """The model a config names, laid out for training over it.

    Raises:
        ConfigurationError, CheckpointError
    """
    return load_base(config, choose_training_kernels(choose_device(config.device)))


def check_outputs(jobs: Sequence[TrainingJob], *, resume: bool = False) -> None:
    """Raise unless each job has a name, and a folder of its own that is free or, to resume, has a checkpoint.

    Raises:
        ConfigurationError
    """
    check_distinct(jobs)
    for job in jobs:
        check_folder(Path(job.output).expanduser(), resume=resume)


def check_distinct(jobs: Sequence[TrainingJob]) -> None:
    """Raise unless each job has a name and a folder of its own.

    Raises:
        ConfigurationError
    """
    if not jobs:
        raise ConfigurationError("there is no job to train", do="give data and output, or job files")
    for what, values in (
        ("output", [str(Path(job.output).expanduser().resolve()) for job in jobs]),
        ("name", [job.label for job in jobs]),
    ):
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ConfigurationError(f"two jobs have one {what}", got=", ".join(twice), do="give each its own")


def prepare_job(job: TrainingJob, base: Base, model: str) -> PreparedJob:
    """Read and check a job's adapter and data.

    Raises:
        ConfigurationError, AdapterError, TrainingDataError
    """
    decoder = base.decoder
    start = choose_start(job, decoder.sites, model)
    context = decoder.max_position_embeddings
    max_length = min(DEFAULT_MAX_LENGTH, context) if job.max_length is None else job.max_length
    if max_length > context:
        raise ConfigurationError("max_length is beyond the model's context", got=max_length, allowed=f"up to {context}")

    def load(path: str) -> Documents:
        return load_documents(
            path,
            base.tokenizer,
            objective=job.objective,
            vocab_size=decoder.vocab_size,
            max_length=max_length,
            long_documents=job.long_documents,
        )

    data = load(job.data)
    if data.num_long:
        what = "cut" if job.long_documents == "truncate" else "split"
        logger.warning("%s: rows of more than %d tokens, which were %s: %d", job.label, max_length, what, data.num_long)
    examples, held_out = _hold_out(data.examples, job)
    if job.eval_data is not None:
        held_out = load(job.eval_data).examples
    return PreparedJob(job=job, start=start, data=data, examples=examples, held_out=held_out)


def start_run(prepared: PreparedJob, base: Base, *, resume: bool) -> JobRun:
    """Make a job ready for its first update, or for the one after its checkpoint.

    Raises:
        ConfigurationError, AdapterError
    """
    return JobRun(
        prepared.job,
        prepared.start,
        DecoderWeights(base.decoder),
        prepared.examples,
        prepared.held_out,
        resume=resume,
    )


def _hold_out(examples: tuple[Example, ...], job: TrainingJob) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """What is learnt from, in order, and what is held out."""
    if not job.eval_fraction:
        return examples, ()
    count = max(1, math.floor(len(examples) * job.eval_fraction))
    if count == len(examples):
        raise ConfigurationError("eval_fraction leaves nothing to learn from", got=f"{len(examples)} rows")
    chosen = set(permutation(len(examples), job.seed, _HELD_OUT_STREAM)[:count])
    kept = tuple(example for index, example in enumerate(examples) if index not in chosen)
    return kept, tuple(examples[index] for index in sorted(chosen))
