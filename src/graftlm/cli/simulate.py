"""`graft simulate`: what clusters of many sizes would do with some traffic, under several routing policies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from graftlm.cli.bench_report import check_can_plot
from graftlm.cli.costs_file import read_costs
from graftlm.cli.options import options_of
from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts
from graftlm.simulation.capacity import requests_per_second
from graftlm.simulation.cluster import ClusterPlan, SimulatedCluster
from graftlm.simulation.outcome import Objective, Outcome, summarize
from graftlm.simulation.policies import POLICIES
from graftlm.simulation.traffic import Traffic
from graftlm.simulation.worker import WorkerSize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = TypeVar("Value")
# Of the time in which requests come: in the first part every cache is empty, and nothing is counted.
_WARM_UP = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One simulated run."""

    workers: int
    zipf: float
    policy: str
    outcome: Outcome


@options_of(
    Traffic,
    into="traffic",
    fields=(
        "seconds", "base_share", "adapter_bytes", "burstiness", "prompt_tokens", "output_tokens", "length_sigma",
        "shared_tokens", "drift_seconds", "seed",
    ),
)  # fmt: skip
@options_of(
    ClusterPlan,
    into="plan",
    fields=(
        "num_routers", "report_seconds", "network_seconds", "speed_spread", "mean_seconds_between_crashes",
        "restart_seconds", "detection_seconds",
    ),
)  # fmt: skip
@options_of(
    WorkerSize, into="size", fields=("max_num_seqs", "max_num_batched_tokens", "cache_tokens", "adapter_memory_bytes")
)
@options_of(Objective, into="objective", fields=("first_token_seconds", "token_seconds"))
def simulate(
    *,
    workers: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of workers.")] = "8,64",
    zipf: Annotated[
        str, typer.Option(metavar="X,X,…", help="How much the popular adapters get: 1 / rank^X each.")
    ] = "0.7,1.0,1.5",
    policies: Annotated[str, typer.Option(metavar="NAME,…", help="Routing policies.")] = ",".join(POLICIES),
    load: Annotated[
        float, typer.Option(min=0.01, help="Requests, as a part of what the workers could compute at best.")
    ] = 0.7,
    adapters_per_worker: Annotated[float, typer.Option(min=0.001, help="Adapters there are, for each worker.")] = 25.0,
    costs_file: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="What steps take, as graft bench --costs has measured it."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw how often the objective is met, and waits.")
    ] = None,
    traffic: dict[str, Any],
    plan: dict[str, Any],
    size: dict[str, Any],
    objective: dict[str, Any],
) -> None:
    """Predict how a cluster would serve some traffic, with the routing of the production.

    Only time and compute are made up. Compare policies and sizes here, and measure before you believe a number.
    """
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError("the folder to write into does not exist", got=path.parent)
    if plot is not None:
        check_can_plot(plot)
    from rich.progress import track

    sizes, skews = _numbers(workers, int, "--workers"), _numbers(zipf, float, "--zipf")
    chosen = policies.split(",")
    if unknown := [name for name in chosen if name not in POLICIES]:
        raise ConfigurationError("this is no routing policy", got=unknown[0], allowed=", ".join(POLICIES))
    costs, measured = (StepCosts(), "made-up costs") if costs_file is None else read_costs(costs_file)
    worker_size, promised = WorkerSize(**size), Objective(**objective)
    rows = []
    for skew, num_workers, name in track(list(itertools.product(skews, sizes, chosen)), transient=True):
        cluster = ClusterPlan(num_workers=num_workers, seed=traffic["seed"], **plan)
        num_adapters = max(1, round(adapters_per_worker * num_workers))
        asked = Traffic(requests_per_second=1.0, zipf=skew, num_adapters=num_adapters, **traffic)
        rate = load * num_workers * requests_per_second(asked, worker_size, costs)
        asked = dataclasses.replace(asked, requests_per_second=rate)
        run = SimulatedCluster(cluster, worker_size, costs, POLICIES[name]).run(asked)
        outcome = summarize(run, promised, warm_up_seconds=_WARM_UP * asked.seconds)
        rows.append(_Row(workers=num_workers, zipf=skew, policy=name, outcome=outcome))
    _print_table(rows, measured)
    if json_file is not None:
        _write_json(rows, json_file, costs, measured)
    if plot is not None:
        _write_plot(rows, plot, f"{measured}, {load:.0%} of capacity", promised)


def _numbers(text: str, kind: Callable[[str], Value], option: str) -> list[Value]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as cause:
        raise ConfigurationError(
            f"{option} cannot be read", got=repr(text), allowed="numbers with commas between them"
        ) from cause


def _print_table(rows: Sequence[_Row], measured: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("workers", "zipf", box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("met", "wait p95", "first p95", "end p95", "cold"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out = row.outcome
        times = (out.wait_p95, out.first_token_p95, out.latency_p95)
        shown = (f"{seconds:.3f}" if math.isfinite(seconds) else "never" for seconds in times)
        table.add_row(str(row.workers), f"{row.zipf:g}", row.policy, f"{out.attainment:.1%}", *shown, f"{out.cold:.0%}")
    console = Console()
    console.print(table)
    console.print(f"Seconds since arrival. Predicted, not measured; steps: {measured}.")


def _write_json(rows: Sequence[_Row], path: Path, costs: StepCosts, measured: str) -> None:
    content = {
        "kind": "predicted by graft simulate",
        "measured": measured,
        "costs": dataclasses.asdict(costs),
        # JSON has no infinity: what never happened is null.
        "runs": [
            {
                **{name: getattr(row, name) for name in ("workers", "zipf", "policy")},
                **{
                    name: value if math.isfinite(value) else None
                    for name, value in dataclasses.asdict(row.outcome).items()
                },
            }
            for row in rows
        ],
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as cause:
        raise ConfigurationError("the figures cannot be written", got=f"{path}: {cause.strerror}") from cause


def _write_plot(rows: Sequence[_Row], path: Path, conditions: str, objective: Objective) -> None:
    """A column for each Zipf: how often the objective is met, and the 95th percentile of the waits."""
    from matplotlib.figure import Figure

    skews = list(dict.fromkeys(row.zipf for row in rows))
    figure = Figure(figsize=(4 * len(skews) + 1, 7), layout="constrained")
    grid = figure.subplots(2, len(skews), squeeze=False, sharex=True, sharey="row")
    for column, skew in enumerate(skews):
        met, waits = grid[0][column], grid[1][column]
        own = [row for row in rows if row.zipf == skew]
        _draw(met, own, lambda outcome: 100 * outcome.attainment)
        _draw(waits, own, lambda outcome: outcome.wait_p95)
        met.set(title=f"Zipf {skew:g}")
        met.set_ylim(-2, 102)
        waits.set(xlabel="workers", yscale="log")
    grid[0][0].set_ylabel(
        f"% of requests with the first token within {objective.first_token_seconds:g} s\n"
        f"and the others within {objective.token_seconds:g} s each"
    )
    grid[1][0].set_ylabel("95 % wait less than (seconds)")
    grid[0][0].legend()
    figure.suptitle(f"Predicted by simulation, not measured. Steps: {conditions}", fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except OSError as cause:
        raise ConfigurationError("the picture cannot be written", got=f"{path}: {cause.strerror}") from cause


def _draw(axes: Axes, rows: Sequence[_Row], read: Callable[[Outcome], float]) -> None:
    for name in dict.fromkeys(row.policy for row in rows):
        points = [(row.workers, read(row.outcome)) for row in rows if row.policy == name]
        axes.plot(*zip(*points, strict=True), label=name, marker="o")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
