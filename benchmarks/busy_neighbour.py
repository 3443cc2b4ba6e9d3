"""What does another busy process cost a layer that two threads share?

A product of one row with a 4096 x 4096 matrix in bfloat16, about a millisecond, over and over: alone, and while another
process keeps a core busy. Threads that wait for each other spin for a while before they sleep; with Graft's setting of
`GOMP_SPINCOUNT`, and with libgomp's own count. Each setting has a process of its own, and they take turns.

    python benchmarks/busy_neighbour.py [--repeats 3] [--calls 300]

Writes its section of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from results import conditions, write_section

SIZE = 4096
# libgomp's where neither OMP_WAIT_POLICY nor GOMP_SPINCOUNT is set.
LIBGOMP_SPINS = "300000"
SETTINGS = {"Graft's": None, "libgomp's": LIBGOMP_SPINS}


def measure(calls: int) -> None:
    """Print the milliseconds of each call."""
    import graftlm  # noqa: F401, I001  before torch: it sets the count
    import torch

    from graftlm.kernels.registry import choose_kernels

    torch.set_num_threads(2)
    kernels = choose_kernels(torch.device("cpu"), deterministic=False)
    matrix = kernels.pack(torch.randn(SIZE, SIZE).bfloat16())
    if matrix is None:
        raise SystemExit("the C++ kernels are not in use: see `graft doctor`")
    x = torch.randn(1, SIZE).bfloat16()
    with torch.inference_mode():
        for _ in range(20):
            matrix.linear(x, None)
        for _ in range(calls):
            began = time.perf_counter()
            matrix.linear(x, None)
            print(f"{(time.perf_counter() - began) * 1e3:.3f}")


def run(spins: str | None, calls: int) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if spins is not None:
        environment["GOMP_SPINCOUNT"] = spins
    command = [sys.executable, __file__, "--measure", "--calls", str(calls)]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in printed.split()]


@contextmanager
def busy_process() -> Iterator[None]:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.calls)
        return
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.repeats):
        for name, spins in SETTINGS.items():
            times.setdefault((name, "alone"), []).extend(run(spins, arguments.calls))
            with busy_process():
                times.setdefault((name, "beside a busy process"), []).extend(run(spins, arguments.calls))
    lines = ["| spin count | | median | 90% within |", "| --- | --- | --- | --- |"]
    for (name, where), own in times.items():
        ninety = statistics.quantiles(own, n=10)[-1]
        lines.append(f"| {name} | {where} | {statistics.median(own):.2f} ms | {ninety:.2f} ms |")
    table = "\n".join(lines)
    print(table)
    write_section(
        "A layer of two threads beside a busy process (`python benchmarks/busy_neighbour.py`)",
        f"One row times a {SIZE} x {SIZE} matrix in bfloat16, two threads. {conditions()}.\n\n{table}\n",
    )


if __name__ == "__main__":
    main()
