"""`graft quantize`: a model written with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from graftlm.calibration import CalibrationReport

# Modules whose inputs are listed: those where one scale for all values costs most.
LISTED_INPUTS = 5
# Scales found on fewer sequences may not hold for other texts.
ENOUGH_SEQUENCES = 64


def quantize(
    model: Annotated[str, typer.Argument(help="Model folder, .gguf file or hub id.")],
    out: Annotated[str, typer.Argument(help="Folder to write, new or empty.")],
    *,
    to: Annotated[
        str, typer.Option(metavar="nf4|nf4-double|fp4|fp4-double|int8|gptq-sym-int4|w8a8", help="The format.")
    ] = "nf4",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Text file that w8a8 finds the scales of inputs on, and is measured on."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Leave a module as it is, by path or whole parts of it. Repeatable."),
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Quantise what is quantised already; both errors add up.")
    ] = False,
) -> None:
    """Write a model with quantised weights, for Graft, and for transformers with the library whose format it is.

    Head, embeddings and norms stay in full precision. gptq-sym-int4 rounds to nearest, without calibration: it costs
    more quality than nf4 does. w8a8 rounds layer inputs to eight bits as well, needs --calibrate, and tells what it
    cost.
    """
    from graftlm.calibration import quantize_calibrated
    from graftlm.checkpoint import open_checkpoint
    from graftlm.models.quantized_export import export_quantized
    from graftlm.quantization.written import CALIBRATED_FORMAT, written_format

    folder, skipped = Path(out).expanduser(), tuple(skip or ())
    if to == CALIBRATED_FORMAT:
        if calibrate is None:
            raise ConfigurationError(
                "w8a8 needs a text to find the scales of layer inputs on", do="add --calibrate with a text file"
            )
        report = quantize_calibrated(model, folder, calibrate, skipped=skipped, requantize=requantize)
        typer.echo(f"wrote {to}: {out}")
        _tell(report)
        return
    written = written_format(to)
    if calibrate is not None:
        raise ConfigurationError(
            f"{to} needs no calibration", got="--calibrate", allowed=f"with {CALIBRATED_FORMAT} only", do="leave it out"
        )
    checkpoint = open_checkpoint(model)
    try:
        export_quantized(checkpoint, folder, written, skipped=skipped, requantize=requantize)
    finally:
        checkpoint.close()
    typer.echo(f"wrote {to}: {out}")


def _tell(report: CalibrationReport) -> None:
    before, after, text = report.perplexity_before, report.perplexity_after, report.text
    where = "held-out sequences" if text.is_held_out else "sequences, the same it was calibrated on"
    change = f"{after / before - 1:+.2%}"
    typer.echo(f"perplexity: {before:.3f} before, {after:.3f} after ({change}), on {len(text.held_out)} {where}")
    if len(text.calibration) < ENOUGH_SEQUENCES:
        typer.echo(f"calibrated on {len(text.calibration)} sequences only: larger inputs of other texts are cut off")
    listed = sorted(report.largest_inputs.items(), key=lambda item: item[1], reverse=True)[:LISTED_INPUTS]
    typer.echo("largest inputs, for which --skip helps most:")
    for path, largest in listed:
        typer.echo(f"  {path}: {largest:.4g}")
