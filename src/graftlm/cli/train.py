"""`graft train`: one adapter, or several over one base."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.engine_options import ModelArgument
from graftlm.cli.options import options_of
from graftlm.config import EngineConfig
from graftlm.errors import ConfigurationError
from graftlm.training.job import TrainingJob, make_job
from graftlm.training.job_file import read_job_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

    from graftlm.engine.base import Base
    from graftlm.text import Tokenizer
    from graftlm.training.document import Document
    from graftlm.training.job_run import JobRun
    from graftlm.training.tensorboard_log import TensorBoardLog
    from graftlm.training.training import PreparedJob, TrainedAdapter

_BASE_OPTIONS = ("dtype", "quantization", "quantize_head", "requantize", "device")


@options_of(TrainingJob, into="options", fields=[field.name for field in dataclasses.fields(TrainingJob)])
@options_of(EngineConfig, into="base", fields=_BASE_OPTIONS)
def train(
    model: ModelArgument,
    *,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with a job's options, in place of those given here. Repeat it for more jobs.",
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, half as much time again or more.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in the output folders.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what it will take, and train nothing.")
    ] = False,
    show: Annotated[
        int, typer.Option(metavar="N", min=0, help="Print N documents, what is learnt in colour, and train nothing.")
    ] = 0,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Load what was trained into the server there, in the place of the adapter of that name.",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the metrics for TensorBoard below this folder too.")
    ] = None,
    base: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Train LoRA adapters, and write them as PEFT does.

    Ctrl-C saves a checkpoint, and --resume goes on from there as if nothing had been.
    """
    from rich.console import Console

    jobs = _jobs(job, options)
    config = EngineConfig(model=model, **base)
    console = Console()
    if dry_run or show:
        _preview(console, config, jobs, show=show, gradient_checkpointing=gradient_checkpointing)
        return
    if publish is not None:
        from graftlm.adapters.name import check_name
        from graftlm.training.publish import check_server

        check_server(publish)
        for one in jobs:
            check_name(one.label)
    trained: list[TrainedAdapter] = []
    try:
        with _tensorboard(tensorboard) as log:
            _train(
                console,
                config,
                jobs,
                log,
                trained.append,
                gradient_checkpointing=gradient_checkpointing,
                resume=resume,
            )
    finally:
        # What has finished is there, whatever became of other jobs.
        for adapter in trained:
            _conclude(adapter, publish)


def _jobs(files: Sequence[str] | None, options: dict[str, Any]) -> list[TrainingJob]:
    fields = {field.name: field.default for field in dataclasses.fields(TrainingJob)}
    given = {name: value for name, value in options.items() if value is not None and value != fields[name]}
    if not files:
        return [make_job(given)]
    if alone := sorted(given.keys() & {"output", "name"}):
        raise ConfigurationError(f"{', '.join(alone)} cannot be one for all jobs", do="write it in the job files")
    return [read_job_file(file, given) for file in files]


def _preview(
    console: Console, config: EngineConfig, jobs: Sequence[TrainingJob], *, show: int, gradient_checkpointing: bool
) -> None:
    from graftlm.training.training import check_outputs, load_frozen_base, prepare_job

    check_outputs(jobs)
    base = load_frozen_base(config)
    for job in jobs:
        prepared = prepare_job(job, base, str(config.model))
        if show:
            for document in prepared.documents[:show]:
                console.print(_coloured(document, base.tokenizer))
        else:
            _print_estimate(console, prepared, base, gradient_checkpointing=gradient_checkpointing)


def _coloured(document: Document, tokenizer: Tokenizer) -> Text:
    """Tokens with bars between them: what is learnt in green, the rest dim."""
    from rich.text import Text

    targets = set(document.targets)
    text = Text()
    for place, token_id in enumerate(document.token_ids):
        style = "bold green" if place in targets else "dim"
        text.append(tokenizer.token_text(token_id), style=style)
        text.append("|", style="dim blue")
    return text


def _print_estimate(console: Console, prepared: PreparedJob, base: Base, *, gradient_checkpointing: bool) -> None:
    from rich.table import Table

    from graftlm.cli.byte_size import format_byte_size
    from graftlm.training.estimate import estimate

    found = estimate(prepared, base, gradient_checkpointing=gradient_checkpointing)
    table = Table(show_header=False, box=None, pad_edge=False, title=prepared.job.label)
    rows = {
        "parameters": f"{found.num_parameters:,} in {found.num_modules} modules",
        "memory": (
            f"about {format_byte_size(found.parameter_bytes)} parameters and AdamW, "
            f"{format_byte_size(found.activation_bytes)} activations, {format_byte_size(found.logits_bytes)} logits, "
            "beside the base"
        ),
        "documents": f"{found.num_documents:,}, of them {found.num_long:,} too long; {found.num_held_out:,} held out",
        "tokens per epoch": f"{found.num_tokens:,}, of them {found.num_targets:,} learnt",
        "steps per epoch": f"{found.steps_per_epoch:g}",
    }
    for label, value in rows.items():
        table.add_row(f"[bold]{label}[/bold]", value)
    console.print(table)


def _train(
    console: Console,
    config: EngineConfig,
    jobs: Sequence[TrainingJob],
    log: TensorBoardLog | None,
    conclude: Callable[[TrainedAdapter], None],
    *,
    gradient_checkpointing: bool,
    resume: bool,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from graftlm.training.training import train_together

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress,
        _stop_on_interrupt() as stop,
    ):
        tasks: dict[str, TaskID] = {}
        begun: dict[str, tuple[float, int]] = {}

        def report(run: JobRun) -> None:
            metrics = run.last_metrics
            loss = f"loss {metrics['loss']:.4f}"
            if "eval_loss" in metrics:
                loss += f", held out {metrics['eval_loss']:.4f}"
            if (speed := _speed(run, begun)) is not None:
                loss += f", {speed:,.0f} tokens/s"
            if log is not None:
                log.add(run.job.label, metrics)
            if (name := run.job.label) not in tasks:
                tasks[name] = progress.add_task(name, loss="")
            progress.update(tasks[name], completed=run.step, total=run.num_steps, loss=loss)

        train_together(
            config,
            jobs,
            gradient_checkpointing=gradient_checkpointing,
            resume=resume,
            report=report,
            is_stopped=stop.is_set,
            conclude=conclude,
        )


def _speed(run: JobRun, begun: dict[str, tuple[float, int]]) -> float | None:
    """Tokens a second since the job's first update, which warms up; None until there is a second one.

    begun: when that ended, and the job's tokens until then, by its name.
    """
    now = time.monotonic()
    start, tokens = begun.setdefault(run.job.label, (now, run.num_tokens))
    return (run.num_tokens - tokens) / (now - start) if now > start else None


def _conclude(adapter: TrainedAdapter, url: str | None) -> None:
    """Say where the adapter is, draw its losses, and publish it."""
    from graftlm.training.loss_plot import plot_losses
    from graftlm.training.publish import publish

    if not adapter.finished:
        typer.echo(f"{adapter.name}: stopped at step {adapter.step}; --resume goes on from {adapter.folder}")
        return
    typer.echo(f"{adapter.name}: written to {adapter.folder}")
    plot = plot_losses(adapter.folder, adapter.name)
    typer.echo(f"{adapter.name}: loss in {plot}" if plot else "no loss.png: pip install 'graftlm[train]'")
    if url is not None:
        digest = publish(url, adapter.name, adapter.folder)
        typer.echo(f"{adapter.name}: served by {url} as version {digest[:12]}")


@contextmanager
def _tensorboard(folder: Path | None) -> Iterator[TensorBoardLog | None]:
    if folder is None:
        yield None
        return
    from graftlm.training.tensorboard_log import TensorBoardLog

    with TensorBoardLog(folder) as log:
        yield log


@contextmanager
def _stop_on_interrupt() -> Iterator[Event]:
    """Set by the first Ctrl-C; the second interrupts as usual."""
    stop = Event()

    def handle(signum: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
