"""How long do requests wait in clusters of 8 to 1000 workers, by routing policy? Predicted by `graft simulate`.

The steps are those of `benchmarks/step_costs.json`, which `graft bench --costs` has measured.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import conditions, write_section

HERE = Path(__file__).parent
PICTURE = HERE / "routing_policies.png"
OURS = "expected-completion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,64,256,1000")
    parser.add_argument("--load", default="0.7", help="requests, as a part of what the workers could compute")
    parser.add_argument("--seconds", default="30", help="in which requests come")
    options = parser.parse_args()
    arguments = [
        "--workers", options.workers, "--load", options.load, "--seconds", options.seconds,
        "--token-seconds", "0.3", "--costs", str(HERE / "step_costs.json"), "--plot", str(PICTURE),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "graftlm.cli", "simulate", *arguments, "--json", str(figures)]
        subprocess.run(command, check=True)
        content = json.loads(figures.read_text(encoding="utf-8"))
    write_section(
        "Predicted, not measured: routing policies in large clusters (`python benchmarks/routing_policies.py`)",
        _section(content, options),
    )


def _section(content: dict[str, Any], options: argparse.Namespace) -> str:
    runs = content["runs"]
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    cells = {(run["zipf"], run["workers"], run["policy"]): run for run in runs}
    lines = []
    num_best = 0
    for zipf, workers in dict.fromkeys((run["zipf"], run["workers"]) for run in runs):
        row = {name: cells[zipf, workers, name] for name in policies}
        waits = {name: _seconds(run["wait_p95"]) for name, run in row.items()}
        num_best += waits[OURS] <= min(waits.values())
        shown = [f"{_shown(waits[name])}, {run['attainment']:.0%}, {run['cold']:.0%}" for name, run in row.items()]
        lines.append(f"| {zipf:g} | {workers} | {' | '.join(shown)} |")
    return "\n".join(
        [
            f"Steps as measured for {content['measured']}; {float(options.load):.0%} of what workers could compute, "
            "25 adapters of 10 MB for each worker and room for 16, 4 routers, reports every second, "
            f"{options.seconds} s of requests of which the first quarter does not count. {conditions()}.",
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
