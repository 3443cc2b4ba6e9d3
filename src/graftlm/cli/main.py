"""The list of commands, and how their failures are told."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from graftlm.cli.adapters import adapters
from graftlm.cli.bench import bench
from graftlm.cli.chat import chat
from graftlm.cli.cluster import cluster
from graftlm.cli.demo import demo
from graftlm.cli.doctor import doctor
from graftlm.cli.generate import generate
from graftlm.cli.inspect import inspect
from graftlm.cli.keys import keys
from graftlm.cli.merge import merge
from graftlm.cli.quantize import quantize
from graftlm.cli.serve import serve
from graftlm.cli.simulate import simulate
from graftlm.cli.train import train
from graftlm.errors import GraftError


class GraftGroup(TyperGroup):
    """Tells what is the user's to mend in one line on stderr, with exit code 2; anything else is a bug and keeps its
    traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraftError as error:
            typer.echo(f"graft: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="graft",
    help="Serve many PEFT adapters on one base model.",
    cls=GraftGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.add_typer(adapters, name="adapters")
app.add_typer(cluster, name="cluster")
app.command()(inspect)
app.command()(merge)
app.command()(quantize)
app.command()(train)
app.command()(bench)
app.command()(simulate)
app.command()(demo)
app.command()(doctor)
app.add_typer(keys, name="keys")


def main() -> None:
    app()
