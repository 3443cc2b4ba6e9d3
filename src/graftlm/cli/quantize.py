"""`graft quantize`: a model written with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quantize(
    model: Annotated[str, typer.Argument(help="Model folder or hub id, not quantised.")],
    out: Annotated[str, typer.Argument(help="Folder to write, new or empty.")],
    *,
    to: Annotated[
        str, typer.Option(metavar="nf4|nf4-double|fp4|fp4-double|int8|gptq-sym-int4", help="The format.")
    ] = "nf4",
) -> None:
    """Write a model with quantised weights, for Graft, and for transformers with bitsandbytes or a GPTQ library.

    Head, embeddings and norms stay in full precision. gptq-sym-int4 rounds to nearest, without calibration: it costs
    more quality than nf4 does.
    """
    from graftlm.checkpoint import open_checkpoint
    from graftlm.models.quantized_export import export_quantized

    checkpoint = open_checkpoint(model)
    try:
        export_quantized(checkpoint, Path(out).expanduser(), to)
    finally:
        checkpoint.close()
    typer.echo(f"wrote {to}: {out}")
