"""`graft bench`: how fast a model answers here, with how many adapters, and how much of the machine that is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.engine_options import ModelArgument
from graftlm.cli.options import options_of
from graftlm.config import EngineConfig
from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from graftlm.routing.costs import StepCosts
    from graftlm.workload import Measurement, Workload

DEFAULT_REQUESTS = 32


@options_of(
    EngineConfig,
    into="engine",
    fields=(
        "adapters", "dtype", "adapter_dtype", "quantization", "quantize_head", "quantize_skip", "quantization_cache",
        "requantize", "deterministic", "device", "max_model_len", "kv_cache_bytes", "adapter_memory_bytes",
        "block_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "allow_pickle",
    ),
)  # fmt: skip
def bench(
    model: ModelArgument,
    *,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help=f"Requests, which all arrive at once; default: {DEFAULT_REQUESTS}.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Numbers of requests to compare, in place of --requests.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Random tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer, greedy; end tokens are ignored.")] = 64,
    random_adapters: Annotated[
        int, typer.Option(metavar="N", min=0, help="LoRAs to make up, on every linear layer but the head.")
    ] = 0,
    rank: Annotated[int, typer.Option(help="Of the random adapters.")] = 16,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each batch size; they take turns, and medians are shown.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts and the random adapters.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures of every run too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw tokens per second against the batch size.")
    ] = None,
    costs_file: Annotated[
        Path | None,
        typer.Option(
            "--costs", metavar="FILE", help="Write what a step takes, for graft simulate; needs adapters to run."
        ),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Measure how fast a model answers on this machine.

    Adapters, given or random, take turns over the requests; without any the base answers. Between the runs the
    machine's limits are measured: a streaming read, and a large product in the model's dtype.
    """
    from graftlm.cli.bench_report import check_can_plot, print_table, write_json, write_plot
    from graftlm.cli.costs_file import write_costs
    from graftlm.workload import Workload

    for path in (json_file, plot, costs_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError("the folder to write into does not exist", got=path.parent)
    if plot is not None:
        check_can_plot(plot)
    random_names = [f"random-{index}" for index in range(random_adapters)]
    if taken := sorted(engine["adapters"].keys() & set(random_names)):
        raise ConfigurationError("a random adapter has this name", got=taken[0], do="give yours another")
    if costs_file is not None and not (engine["adapters"] or random_names):
        raise ConfigurationError("--costs are of adapters too", do="give --random-adapters 8, or --adapter")
    workloads = [
        Workload(
            num_requests=size,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            adapters=(*engine["adapters"], *random_names),
            seed=seed,
        )
        for size in _sizes(requests, batch_sizes)
    ]
    with tempfile.TemporaryDirectory(prefix="graft-bench-") as folder:
        paths = {name: Path(folder) / name for name in random_names}
        _write_adapters(paths.values(), model, rank=rank, seed=seed)
        options = {**engine, "adapters": {**engine["adapters"], **paths}}
        measured, costs = _measure(model, options, workloads, repeats, with_costs=costs_file is not None)
    print_table(measured)
    if costs_file is not None and costs is not None:
        write_costs(costs, costs_file, measured=f"{measured.model}, {measured.dtype}, kernels {measured.kernels}")
    if json_file is not None:
        write_json(measured, json_file)
    if plot is not None:
        write_plot(measured, plot)


def _sizes(requests: int | None, batch_sizes: str | None) -> list[int]:
    if batch_sizes is None:
        return [DEFAULT_REQUESTS if requests is None else requests]
    if requests is not None:
        raise ConfigurationError("--batch-sizes stands in place of --requests", do="leave one of them out")
    try:
        return [int(text) for text in batch_sizes.split(",")]
    except ValueError as cause:
        raise ConfigurationError(
            "--batch-sizes cannot be read", got=repr(batch_sizes), allowed="numbers with commas, such as 1,8,32"
        ) from cause


def _write_adapters(folders: Collection[Path], model: str, *, rank: int, seed: int) -> None:
    if not folders:
        return
    from graftlm.checkpoint import open_checkpoint
    from graftlm.models.read import read_sites
    from graftlm.workload import write_random_adapter

    checkpoint = open_checkpoint(model)
    try:
        sites = read_sites(checkpoint)
    finally:
        checkpoint.close()
    for index, folder in enumerate(folders):
        write_random_adapter(folder, sites, rank=rank, seed=seed + index)


def _measure(
    model: str, options: Mapping[str, Any], workloads: Sequence[Workload], repeats: int, *, with_costs: bool
) -> tuple[Measurement, StepCosts | None]:
    from graftlm.engine.engine import Engine
    from graftlm.workload import measure_costs, measure_workloads

    # A prompt that comes again has to be computed again.
    engine = Engine(EngineConfig(model=model, prefix_cache=False, **options))
    try:
        measured = measure_workloads(engine, workloads, repeats=repeats)
        if not with_costs:
            return measured, None
        adapter = Path(next(iter(options["adapters"].values())))
        return measured, measure_costs(engine, adapter, prompt_tokens=workloads[0].prompt_tokens)
    finally:
        engine.close()
