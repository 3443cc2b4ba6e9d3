"""`graft merge`: a base and an adapter made one model."""

from __future__ import annotations

from typing import Annotated

import typer


def merge(
    base: Annotated[str, typer.Argument(help="Model folder or hub id, not quantised.")],
    adapter: Annotated[
        str, typer.Argument(help="Adapter folder, weights file or hub id, or a sum of several: a:0.7+b:0.3.")
    ],
    out: Annotated[str, typer.Argument(help="Folder to write, new or empty.")],
    *,
    allow_pickle: Annotated[bool, typer.Option(help="Read .bin weights, with torch's restricted unpickler.")] = False,
) -> None:
    """Write the model that a base is with an adapter, for transformers and whatever reads its folders.

    Computed in float32 and rounded once to the base's dtypes. What cannot be merged exactly is refused.
    """
    import graftlm

    merged = graftlm.merge(base, adapter, out, allow_pickle=allow_pickle)
    typer.echo(f"merged {merged.method} into {len(merged.modules)} modules: {out}")
