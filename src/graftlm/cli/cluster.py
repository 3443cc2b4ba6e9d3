"""`graft cluster`: the processes behind a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from graftlm.cli.api_client import LOCAL, ApiKeyOption, JsonOption, UrlOption, fetch
from graftlm.errors import RemoteError

cluster = typer.Typer(help="Look at the workers of a running server.", no_args_is_help=True)


@cluster.callback()
def group() -> None:
    """A group, though of one command."""


@cluster.command()
def status(*, url: UrlOption = LOCAL, api_key: ApiKeyOption = None, as_json: JsonOption = False) -> None:
    """Show each worker's place, layers, adapters and load."""
    engine = fetch(url, api_key, "GET", "/status")["engine"]
    if engine is None:
        raise RemoteError("this key may not see what the server is doing", do="use one that may read metrics")
    if as_json:
        typer.echo(json.dumps(engine))
        return
    if not engine["workers"]:
        typer.echo("no workers: the model is in the server's own process")
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    names = ("worker", "node", "process", "state", "layers", "rank", "adapters", "steps", "ms a step", "ms idle")
    table = Table(*names, "sent", "running", "waiting", "cache", box=None, pad_edge=False)
    for worker in engine["workers"]:
        table.add_row(*_place(worker), *_work(worker["work"], decimal), *_load(worker["load"]))
    console = Console()
    console.print(table)
    console.print(
        f"{engine['num_running']} answers running, {engine['num_waiting']} waiting, "
        f"{engine['kv_cache_usage']:.0%} of the KV cache held, {engine['num_lost_workers']} workers lost so far"
    )


def _place(worker: Mapping[str, Any]) -> tuple[str, ...]:
    layers = worker["layers"]
    return (
        worker["id"],
        # Ray's names of nodes have 56 letters.
        worker["node"][:12],
        str(worker["pid"]),
        worker["state"],
        "" if layers is None else f"{layers[0]}-{layers[1] - 1}",
        "" if worker["rank"] is None else str(worker["rank"]),
        ", ".join(worker["adapters"]),
    )


def _work(work: Mapping[str, Any] | None, size: Any) -> tuple[str, ...]:
    if work is None:
        return ("",) * 4
    steps = work["num_steps"]
    compute, idle = (f"{1000 * work[key] / steps:.1f}" if steps else "" for key in ("compute_seconds", "idle_seconds"))
    return str(steps), compute, idle, size(work["hop_bytes"])


def _load(load: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of a replica."""
    if load is None:
        return ("",) * 3
    return str(load["num_running"]), str(load["num_waiting"]), f"{load['kv_cache_usage']:.0%}"
