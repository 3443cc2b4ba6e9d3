"""`graft adapters`: what a running server serves, loaded and unloaded from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from graftlm.cli.api_client import LOCAL, ApiKeyOption, JsonOption, UrlOption, fetch

adapters = typer.Typer(help="List, load and unload the adapters of a running server.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]


@adapters.command()
def ls(*, url: UrlOption = LOCAL, api_key: ApiKeyOption = None, as_json: JsonOption = False) -> None:
    """List the base and its adapters."""
    cards = fetch(url, api_key, "GET", "/v1/models")["data"]
    if as_json:
        typer.echo(json.dumps(cards))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "weights", "method", "size", box=None, pad_edge=False)
    for card in cards:
        table.add_row(card["id"], card.get("residency", "base"), card.get("method") or "", _size(card))
    Console().print(table)


@adapters.command()
def info(
    name: NameArgument, *, url: UrlOption = LOCAL, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """Show what the server says of one adapter."""
    card = fetch(url, api_key, "GET", f"/v1/models/{quote(name)}")
    if as_json:
        typer.echo(json.dumps(card))
        return
    width = max(map(len, card))
    for key, value in card.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        typer.echo(f"{key:{width}}  {'' if shown is None else shown}".rstrip())


@adapters.command()
def load(
    name: NameArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder on the server, below one of its adapter roots.")],
    *,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the name from another adapter.")] = False,
) -> None:
    """Load an adapter; it answers to its name from then on."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
    card = fetch(url, api_key, "POST", "/v1/load_lora_adapter", body)
    typer.echo(f"{name}: {card['method']}, {_size(card)}, {card['bound']} of {card['total']} tensors bound")


@adapters.command()
def unload(
    name: NameArgument,
    *,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = None,
    force: Annotated[bool, typer.Option("--force", help="End its running requests at once.")] = False,
) -> None:
    """Forget an adapter; its running requests finish."""
    fetch(url, api_key, "POST", "/v1/unload_lora_adapter", {"lora_name": name, "force": force})
    typer.echo(f"{name}: unloaded")


def _size(card: Mapping[str, Any]) -> str:
    from rich.filesize import decimal

    return decimal(card["num_bytes"]) if card.get("num_bytes") is not None else ""
