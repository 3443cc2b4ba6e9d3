"""`graft inspect`: what an adapter folder holds, and whether it fits a base; or how a model is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from graftlm.cli.inspect_model import show_model
from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graftlm.adapters import Adapter, BoundModule
    from graftlm.adapters.inspect import AdapterReport, ModuleReport

    Module = TypeVar("Module", ModuleReport, BoundModule)


def inspect(
    source: Annotated[
        str, typer.Argument(help="Adapter folder, weights file or hub id; or a model's folder or .gguf file.")
    ],
    *,
    base: Annotated[str | None, typer.Option(help="Model to fit the adapter to.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run it over --base and compare with PEFT, which must be installed.")
    ] = False,
    every_module: Annotated[bool, typer.Option("--every-module", help="One row per module, not per kind.")] = False,
    allow_pickle: Annotated[bool, typer.Option(help="Read .bin weights, with torch's restricted unpickler.")] = False,
) -> None:
    """Show an adapter's method, ranks, scaling, modules, bytes and tokenizer files, or how a model stores its weights.

    With --base also what becomes of each of the base's modules. Exits with 1 when the adapter cannot be served, on any
    base or on the one given, or when --check finds other logits or tokens than PEFT's.
    """
    if check and base is None:
        raise ConfigurationError("--check compares logits, which needs a model", do="give --base")
    from rich.console import Console

    from graftlm.adapters.inspect import inspect_adapter
    from graftlm.checkpoint import is_local_model

    console = Console()
    if is_local_model(source):
        if base is not None:
            raise ConfigurationError("--base is for adapters, and this is a model", got=source)
        show_model(console, source, every_module=every_module)
        return
    report = inspect_adapter(source, allow_pickle=allow_pickle)
    console.print(_summary(report))
    console.print(_modules(report, every_module=every_module))
    if report.refusal is not None:
        console.print(f"[red]Not served:[/red] {report.refusal}", highlight=False)
        raise typer.Exit(1)
    if base is not None:
        fitted = _fit(source, base, allow_pickle=allow_pickle)
        console.print(_changes(fitted, every_module=every_module))
        console.print(
            f"[green]Fits[/green] {Path(base).name}: bound {fitted.bound} of {fitted.total} tensors to "
            f"{len(fitted.modules)} modules, {fitted.num_bytes:,} bytes when loaded",
            highlight=False,
        )
        if check:
            _check(console, source, base, allow_pickle=allow_pickle)


def _summary(report: AdapterReport) -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "method": report.method,
        "trained on": report.trained_on or "not recorded",
        "peft version": report.peft_version or "not recorded",
        "weights": f"{report.num_tensors} tensors, {', '.join(report.dtypes)}, {report.num_bytes:,} bytes",
        "digest": report.digest[:16],
        "tokenizer files": ", ".join(report.text_files) or "none",
    }
    for label, value in rows.items():
        table.add_row(f"[bold]{label}[/bold]", value)
    return table


def _modules(report: AdapterReport, *, every_module: bool) -> Table:
    from rich import box
    from rich.table import Column, Table

    table = Table(
        Column("module", no_wrap=True),
        Column("count", justify="right"),
        Column("rank", justify="right"),
        Column("scaling", justify="right"),
        Column("tensors", no_wrap=True),
        Column("bytes", justify="right"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for kind, modules in _group(report.modules, every_module=every_module):
        first = modules[0]
        table.add_row(
            kind,
            str(len(modules)),
            "" if first.rank is None else str(first.rank),
            "" if first.scaling is None else f"{first.scaling:g}",
            "\n".join(f"{role.removesuffix('.weight')} {_times(shape)}" for role, shape in first.tensors.items()),
            f"{sum(module.num_bytes for module in modules):,}",
        )
    return table


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _changes(adapter: Adapter, *, every_module: bool) -> Table:
    """What becomes of the base's modules."""
    from rich import box
    from rich.table import Column, Table

    table = Table(
        Column("module of the base", no_wrap=True),
        Column("count", justify="right"),
        Column("rank", justify="right"),
        Column("scaling", justify="right"),
        Column("what happens to it"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for kind, modules in _group(adapter.modules, every_module=every_module):
        first = modules[0]
        table.add_row(
            kind,
            str(len(modules)),
            "" if first.rank is None else str(first.rank),
            "" if first.scaling is None else f"{first.scaling:g}",
            ", ".join(first.changes),
        )
    return table


def _group(modules: Sequence[Module], *, every_module: bool) -> list[tuple[str, list[Module]]]:
    """Modules that differ in nothing but their layer, under a path with * for the layer."""
    if every_module:
        return [(module.path, [module]) for module in modules]

    def kind(module: Module) -> tuple[str, str]:
        pattern = ".".join("*" if part.isdigit() else part for part in module.path.split("."))
        return pattern, repr(replace(module, path=""))

    return [(key[0], list(members)) for key, members in groupby(sorted(modules, key=kind), key=kind)]


def _fit(adapter: str, base: str, *, allow_pickle: bool) -> Adapter:
    from graftlm.adapters import load_adapter
    from graftlm.checkpoint import open_checkpoint
    from graftlm.errors import AdapterError
    from graftlm.models.base_weights import CheckpointWeights

    checkpoint = open_checkpoint(base)
    try:
        return load_adapter(
            "inspected",
            adapter,
            CheckpointWeights(checkpoint),
            max_bytes=2**62,
            allow_pickle=allow_pickle,
        ).adapter
    except AdapterError as error:
        typer.echo(f"Does not fit {Path(base).name}: {error}")
        raise typer.Exit(1) from error


def _check(console: Console, adapter: str, base: str, *, allow_pickle: bool) -> None:
    from graftlm.cli.peft_check import compare_with_peft

    found = compare_with_peft(base, adapter, allow_pickle=allow_pickle)
    verdict = "[green]Agrees with PEFT[/green]" if found.agrees else "[red]Disagrees with PEFT[/red]"
    console.print(
        f"{verdict}: logits differ by {found.difference:.3g} at most ({found.allowed:.3g} allowed; the adapter moves "
        f"the base's by {found.moved:.3g}), {found.num_equal} of {found.num_tokens} greedy tokens are equal",
        highlight=False,
    )
    if not found.agrees:
        raise typer.Exit(1)
