"""How long do requests wait in clusters of 8 to 1000 workers, by routing policy? Predicted by `graft simulate`.

The steps are those of `benchmarks/step_costs.json`, which `graft bench --costs` has measured. Few workers see few
requests, of which chance makes much: small clusters are simulated several times, and medians shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import conditions, write_section

HERE = Path(__file__).parent
PICTURE = HERE / "routing_policies.png"
OURS = "expected-completion"
# Of a cluster with more workers than that one run says enough.
SMALL = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,64,256,1000")
    parser.add_argument("--load", default="0.7", help="requests, as a part of what the workers could compute")
    parser.add_argument("--seconds", default="30", help="in which requests come")
    parser.add_argument("--seeds", type=int, default=7, help=f"runs of clusters of up to {SMALL} workers")
    options = parser.parse_args()
    content = _simulate(options, options.workers, seed=0, plot=True)
    small = ",".join(size for size in options.workers.split(",") if int(size) <= SMALL)
    for seed in range(1, options.seeds if small else 1):
        content["runs"] += _simulate(options, small, seed=seed, plot=False)["runs"]
    write_section(
        "Predicted, not measured: routing policies in large clusters (`python benchmarks/routing_policies.py`)",
        _section(content, options),
    )


def _simulate(options: argparse.Namespace, workers: str, *, seed: int, plot: bool) -> dict[str, Any]:
    """What `graft simulate` writes."""
    arguments = [
        "--workers", workers, "--load", options.load, "--seconds", options.seconds, "--seed", str(seed),
        "--token-seconds", "0.3", "--costs", str(HERE / "step_costs.json"), *(["--plot", str(PICTURE)] if plot else []),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "graftlm.cli", "simulate", *arguments, "--json", str(figures)]
        subprocess.run(command, check=True)
        content: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return content


def _section(content: dict[str, Any], options: argparse.Namespace) -> str:
    runs = content["runs"]
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    lines = []
    num_best = 0
    for zipf, workers in dict.fromkeys((run["zipf"], run["workers"]) for run in runs):
        here = [run for run in runs if (run["zipf"], run["workers"]) == (zipf, workers)]
        waits, shown = {}, []
        for name in policies:
            own = [run for run in here if run["policy"] == name]
            waits[name] = statistics.median(_seconds(run["wait_p95"]) for run in own)
            met, cold = (statistics.median(run[key] for run in own) for key in ("attainment", "cold"))
            shown.append(f"{_shown(waits[name])}, {met:.0%}, {cold:.0%}")
        num_best += waits[OURS] <= min(waits.values())
        lines.append(f"| {zipf:g} | {workers} | {' | '.join(shown)} |")
    return "\n".join(
        [
            f"Steps as measured for {content['measured']}; {float(options.load):.0%} of what workers could compute, "
            "25 adapters of 10 MB for each worker and room for 16, 4 routers, reports every second, "
            f"{options.seconds} s of requests of which the first quarter does not count; medians of {options.seeds} "
            f"runs for clusters of up to {SMALL} workers. {conditions()}.",
            "",
            "95th percentile of the wait until a request first computes, how many requests met the objective (first "
            "token within 2 s, others within 0.3 s each on average), and how many came before their adapter:",
            "",
            "| Zipf | workers | " + " | ".join(policies) + " |",
            "| --- " * (2 + len(policies)) + "|",
            *lines,
            "",
            f"* {OURS} has the shortest 95th percentile in {num_best} of {len(lines)} rows.",
            "",
            f"![attainment and waits by number of workers, predicted]({PICTURE.name})",
        ]
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"


def _seconds(value: float | None) -> float:
    return math.inf if value is None else value


if __name__ == "__main__":
    main()
