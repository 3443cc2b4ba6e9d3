"""How fast is Graft beside transformers, PEFT's mixed batch and, where they are installed, vLLM and llama.cpp?

Requests of 128 prompt and 64 output tokens on SmolLM2-135M, greedy, end tokens ignored: without adapters, and with 1, 8
and 32 random ones of rank 16 on all linear layers, which take turns over the requests. transformers stands for PEFT
(`adapter_names`) where there are adapters, which Graft and vLLM keep in the run's dtype, and PEFT in float32; llama.cpp
answers one request at a time. Every measurement is a fresh process and systems take turns, so a slow minute of the
machine hits all of them. Rounds go on until the time is up, and medians are shown; a system that fails is named with
its error and left out. The machine's limits are measured in each of Graft's processes.

    python benchmarks/vs_peers.py [--dtype bfloat16|float32] [--budget-seconds 360] [--quick]
        [--python vllm=/path/to/its/python]

Writes its section of benchmarks/RESULTS.md and the plot beside it, but for --quick, which shows in a minute whether
everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import RESULTS, conditions, write_section
from subject import RANK, load_reference, write_adapters

from graftlm.demo import demo_model
from graftlm.workload import Workload

SCRIPT = Path(__file__).parent / "peers.py"
PLOT = RESULTS.parent / "vs_peers.png"
# The module that shows whether a system is installed.
MODULES = {"graft": "graftlm", "transformers": "transformers", "vllm": "vllm", "llama.cpp": "llama_cpp"}
# One measurement may take no longer.
TIMEOUT_SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Scale:
    """batch_sizes: by number of adapters, in the order in which they are measured."""

    prompt_tokens: int
    output_tokens: int
    batch_sizes: dict[int, tuple[int, ...]]
    rank: int


FULL = Scale(
    prompt_tokens=128, output_tokens=64, rank=RANK, batch_sizes={0: (1, 8, 32), 8: (8, 32), 1: (1, 32), 32: (32,)}
)
QUICK = Scale(prompt_tokens=16, output_tokens=8, rank=4, batch_sizes={0: (1, 2), 2: (2,), 1: (1,)})


@dataclass(frozen=True)
class Cell:
    """One process: a system with some adapters, at all their batch sizes."""

    system: str
    num_adapters: int


@dataclass(kw_only=True)
class Outcomes:
    """results: of each cell, what each of its processes printed. failures: systems that could not be measured."""

    results: dict[Cell, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[Cell, str] = field(default_factory=dict)

    def values(self, cell: Cell, figure: str, batch_size: int) -> list[float]:
        """Of all rounds; JSON has made the batch sizes text."""
        results = [result for result in self.results.get(cell, []) if figure in result]
        return [value for result in results if (value := result[figure].get(str(batch_size))) is not None]

    def median(self, cell: Cell, figure: str, batch_size: int) -> float | None:
        values = self.values(cell, figure, batch_size)
        return statistics.median(values) if values else None

    def limits(self) -> tuple[float, float]:
        """The best that any process of Graft's saw: bytes and floating-point operations per second."""
        found = [result["limits"] for results in self.results.values() for result in results if "limits" in result]
        return max(pair[0] for pair in found), max(pair[1] for pair in found)


def cells(systems: Sequence[str], scale: Scale) -> Iterator[Cell]:
    """The order within a round: what is compared stands side by side, the least important last."""
    for num_adapters in scale.batch_sizes:
        for system in systems:
            if batch_sizes(Cell(system, num_adapters), scale):
                yield Cell(system, num_adapters)


def batch_sizes(cell: Cell, scale: Scale) -> tuple[int, ...]:
    """What a cell is measured at."""
    sizes = scale.batch_sizes[cell.num_adapters]
    if cell.system == "llama.cpp":
        return tuple(size for size in sizes if size == 1)
    return sizes


def installed(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def measure(cell: Cell, job: dict[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """One measurement in a fresh process.

    Raises:
        RuntimeError: with the last line of what the process said, if it failed.
    """
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "system": cell.system}))
    try:
        done = subprocess.run(
            [python, str(SCRIPT), str(path)],
            check=False, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env={**os.environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired as cause:
        raise RuntimeError(f"more than {TIMEOUT_SECONDS} s") from cause
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_all(
    pythons: dict[str, str], scale: Scale, job: dict[str, Any], folder: Path, *, budget_seconds: float, rounds: int
) -> Outcomes:
    """Rounds over all cells. A cell that is known not to end within the time, by its own last run or else by the
    longest of its system, is left out."""
    outcomes, begun, costs = Outcomes(), time.monotonic(), dict[Cell, float]()
    for number in range(rounds):
        for cell in cells(list(pythons), scale):
            left = budget_seconds - (time.monotonic() - begun)
            expected = costs.get(
                cell, max((cost for other, cost in costs.items() if other.system == cell.system), default=0)
            )
            if cell in outcomes.failures or left <= expected:
                continue
            started = time.monotonic()
            names = list(job["adapters"])[: cell.num_adapters]
            own = {
                **job,
                "batch_sizes": batch_sizes(cell, scale),
                "adapters": {name: job["adapters"][name] for name in names},
                "gguf_adapters": {name: job["gguf_adapters"][name] for name in names if name in job["gguf_adapters"]},
            }
            try:
                result = measure(cell, own, pythons[cell.system], folder)
            except RuntimeError as error:
                outcomes.failures[cell] = str(error)
                print(f"round {number + 1}: {label(cell)} failed: {error}", file=sys.stderr)
                continue
            costs[cell] = time.monotonic() - started
            outcomes.results.setdefault(cell, []).append(result)
            speeds = ", ".join(f"{size}: {speed:.1f}" for size, speed in result["tokens_per_second"].items())
            print(
                f"round {number + 1}: {label(cell)}, {cell.num_adapters} adapters, tokens/s by requests: {speeds} "
                f"({costs[cell]:.0f} s)",
                file=sys.stderr,
            )
    return outcomes


def label(cell: Cell) -> str:
    return "PEFT" if cell.system == "transformers" and cell.num_adapters else cell.system


def export(model: Path | str, dtype: str, folder: Path) -> None:
    """The model in one dtype as a folder that all systems read."""
    from transformers import AutoTokenizer

    load_reference(dtype, model).save_pretrained(folder)
    path = Path(model)
    if path.is_file():
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    else:
        AutoTokenizer.from_pretrained(str(model)).save_pretrained(folder)


def report(outcomes: Outcomes, systems: Sequence[str], scale: Scale, dtype: str) -> str:
    """A table of medians, and of Graft's shares of the limits, in Markdown."""
    bytes_per_second, flops = outcomes.limits()
    kernels = next(
        result["kernels"] for results in outcomes.results.values() for result in results if "kernels" in result
    )
    names = {system: "transformers / PEFT" if system == "transformers" else system for system in systems}
    others = [system for system in systems if system != "graft"]
    lines = [
        f"{scale.prompt_tokens} + {scale.output_tokens} tokens, {dtype}, adapters of rank {scale.rank}; Graft's "
        f"kernels: {kernels}. {conditions()}.",
        "",
        f"Limits measured in the same run: {bytes_per_second / 1e9:.1f} GB/s read, {flops / 1e9:.0f} GFLOP/s. "
        "Speeds are output tokens per second, prompts' time included, medians of the rounds in brackets.",
        "",
        "| requests | adapters | "
        + " | ".join(names.values())
        + " | "
        + " | ".join(f"Graft over {names[system]}" for system in others)
        + " | of bandwidth, decode | of FLOPs, decode | of FLOPs, prompts |",
        "| --- " * (5 + len(systems) + len(others)) + "|",
    ]
    for num_adapters in sorted(scale.batch_sizes):
        for size in scale.batch_sizes[num_adapters]:
            graft = Cell("graft", num_adapters)
            speeds = {
                system: outcomes.median(Cell(system, num_adapters), "tokens_per_second", size) for system in systems
            }
            counts = {
                system: len(outcomes.values(Cell(system, num_adapters), "tokens_per_second", size))
                for system in systems
            }
            own = speeds["graft"]
            row = [str(size), str(num_adapters)]
            row += ["" if speeds[each] is None else f"{speeds[each]:.1f} ({counts[each]})" for each in systems]
            row += ["" if own is None or not speeds[each] else f"{own / speeds[each]:.2f}" for each in others]
            for figure in ("bandwidth_share", "decode_flops_share", "prompt_flops_share"):
                share = outcomes.median(graft, figure, size)
                row.append("" if share is None else f"{share:.0%}")
            lines.append("| " + " | ".join(row) + " |")
    lines += ["", *own_ratios(outcomes, scale)]
    for cell, error in outcomes.failures.items():
        lines.append(f"* {label(cell)} with {cell.num_adapters} adapters was not measured: {error}")
    return "\n".join(lines)


def own_ratios(outcomes: Outcomes, scale: Scale) -> list[str]:
    """What Graft's speed with adapters is of its speed without, within each round."""
    base = outcomes.results.get(Cell("graft", 0), [])
    lines = []
    for num_adapters in sorted(scale.batch_sizes):
        size = max(scale.batch_sizes[num_adapters])
        with_adapters = outcomes.results.get(Cell("graft", num_adapters), [])
        ratios = [
            own["tokens_per_second"][str(size)] / plain["tokens_per_second"][str(size)]
            for own, plain in zip(with_adapters, base, strict=False)
            if str(size) in plain["tokens_per_second"]
        ]
        if num_adapters and ratios:
            lines.append(
                f"* Graft with {num_adapters} adapter{'' if num_adapters == 1 else 's'} over Graft without, {size} "
                f"requests: {statistics.median(ratios):.2f}"
            )
    return lines


def draw(outcomes: Outcomes, systems: Sequence[str], scale: Scale, path: Path) -> None:
    """Tokens per second against the number of adapters, and against the batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_adapters, by_size = figure.subplots(1, 2)
    largest = max(max(sizes) for sizes in scale.batch_sizes.values())
    for system in systems:
        name = "transformers / PEFT" if system == "transformers" else system
        points = [
            (num_adapters, speed)
            for num_adapters in sorted(scale.batch_sizes)
            if (speed := outcomes.median(Cell(system, num_adapters), "tokens_per_second", largest)) is not None
        ]
        if points:
            by_adapters.plot(*zip(*points, strict=True), label=name, marker="o")
        for num_adapters, style in ((0, "-"), (max(n for n in scale.batch_sizes if n < largest), "--")):
            points = [
                (size, speed)
                for size in scale.batch_sizes[num_adapters]
                if (speed := outcomes.median(Cell(system, num_adapters), "tokens_per_second", size)) is not None
            ]
            if points:
                by_size.plot(*zip(*points, strict=True), style, label=f"{name}, {num_adapters} adapters", marker="o")
    by_adapters.set(title=f"{largest} requests", xlabel="adapters", ylabel="output tokens per second")
    by_size.set(title="by batch size", xlabel="requests", ylabel="output tokens per second")
    for axes in (by_adapters, by_size):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--model", default=None, help="folder, .gguf file or hub id; default: the demo's")
    parser.add_argument("--budget-seconds", type=float, default=360)
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH", help="where a system lives")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    given = dict(entry.split("=", 1) for entry in options.python if "=" in entry)
    if given.keys() - MODULES.keys() or len(given) != len(options.python):
        parser.error(f"--python takes SYSTEM=PATH, SYSTEM one of {', '.join(MODULES)}")
    pythons = {system: given.get(system, sys.executable) for system in MODULES}
    pythons = {system: python for system, python in pythons.items() if installed(python, MODULES[system])}
    model = options.model or demo_model()
    if Path(model).suffix != ".gguf":
        pythons.pop("llama.cpp", None)
    with tempfile.TemporaryDirectory(prefix="graft-peers-") as name:
        folder = Path(name)
        export(model, options.dtype, folder / "model")
        adapters = write_adapters(folder, model=model, count=max(scale.batch_sizes), rank=scale.rank)
        job: dict[str, Any] = {
            "model": str(folder / "model"),
            "dtype": options.dtype,
            "rank": scale.rank,
            "output_tokens": scale.output_tokens,
            "prompts": prompts_of(folder / "model", scale),
            "adapters": {name: str(path) for name, path in adapters.items()},
            "gguf_adapters": {},
        }
        if "llama.cpp" in pythons:
            from gguf_peer import write_gguf, write_gguf_adapter

            job["gguf"] = str(write_gguf(Path(model), folder / "model.gguf", options.dtype))
            first = next(iter(adapters))
            job["gguf_adapters"] = {first: str(write_gguf_adapter(adapters[first], folder / "adapter.gguf"))}
        outcomes = measure_all(
            pythons, scale, job, folder,
            budget_seconds=options.budget_seconds, rounds=1 if options.quick else options.rounds,
        )  # fmt: skip
    if not any(cell.system == "graft" for cell in outcomes.results):
        return 1
    text = report(outcomes, list(pythons), scale, options.dtype)
    print(text)
    if not options.quick:
        draw(outcomes, list(pythons), scale, PLOT)
        picture = f"![tokens per second by adapters and by batch size]({PLOT.name})"
        write_section(
            f"Beside other systems (`python benchmarks/vs_peers.py`, {options.dtype})", f"{text}\n\n{picture}"
        )
    return 0


def prompts_of(model: Path, scale: Scale) -> list[list[int]]:
    """What Graft's own processes ask themselves."""
    from graftlm.text import load_tokenizer

    workload = Workload(
        num_requests=max(max(sizes) for sizes in scale.batch_sizes.values()),
        prompt_tokens=scale.prompt_tokens,
        output_tokens=scale.output_tokens,
    )
    return workload.prompts(len(load_tokenizer(model)))


if __name__ == "__main__":
    sys.exit(main())
