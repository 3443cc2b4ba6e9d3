"""`graft keys`: API keys for `graft serve --api-keys`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graftlm.errors import ConfigurationError

keys = typer.Typer(help="API keys for graft serve --api-keys.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """API keys for graft serve --api-keys."""


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is called: the tenant in logs and shares.")],
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Names it may use, such as 'legal-*'; default: all. Repeat it for more."),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Most requests; default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most tokens, of prompts and answers; default: no limit.")
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=1, help="Most requests at a time; default: no limit.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may load and unload adapters.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read /metrics.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="Add the entry to this file, which a running server reads again by itself.")
    ] = None,
) -> None:
    """Make a key, and the entry that lets a server know it.

    The key is shown once and kept nowhere. Without --file the entry goes to stdout and the key to stderr; with it, the
    key goes to stdout.
    """
    from graftlm.server.api_keys import check_key_name, digest_of, new_key

    check_key_name(name)
    key = new_key()
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    lines = [
        f'[keys."{name}"]',
        f'sha256 = "{digest_of(key)}"',
        f"models = {json.dumps(model or ['*'])}",
        *(f"{field} = {limit}" for field, limit in limits.items() if limit is not None),
        *(["admin = true"] if admin else []),
        *(["metrics = true"] if metrics else []),
    ]
    entry = "\n".join(lines) + "\n"
    if file is None:
        typer.echo(f"The key, which is shown only now:\n{key}", err=True)
        typer.echo(entry)
    else:
        _add(file, name, entry)
        typer.echo(key)


def _add(file: Path, name: str, entry: str) -> None:
    from graftlm.server.api_keys import parse_keys

    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigurationError("the file of API keys cannot be read", got=str(cause)) from cause
    if any(key.name == name for key in parse_keys(before)):
        raise ConfigurationError("an API key has this name already", got=name, do="choose another, or remove its entry")
    # Appended in one write: owner and mode stay, and a server that reads in between sees all of it or nothing.
    added = entry if not before else f"\n{entry}" if before.endswith("\n") else f"\n\n{entry}"
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(added)
    except OSError as cause:
        raise ConfigurationError("the file of API keys cannot be written", got=str(cause)) from cause
