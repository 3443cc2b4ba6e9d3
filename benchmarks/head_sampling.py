"""What does choosing tokens from a large vocabulary cost?

A head of 250 880 rows (BLOOM's, about Gemma's) in bfloat16 gives logits for a batch, and a token is chosen from each
row: greedily, at random, and at random among the best. Beside it, in turn, the bytes of the head are read and nothing
is done with them: the bound for a few rows.

    python benchmarks/head_sampling.py [--rows 32] [--width 1024] [--repeats 15]

Writes its section of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from results import conditions, write_section
from torch import Tensor

import graftlm  # noqa: F401  before torch: it says how its threads wait
from graftlm.kernels.ops import TokenDraw
from graftlm.kernels.registry import choose_kernels

VOCABULARY = 250_880
HOWS = {
    "greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    "temperature 1": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
    "top-k 50": {"temperature": 1.0, "top_p": 1.0, "top_k": 50},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95, "top_k": 0},
}
Work = Callable[[], object]


def milliseconds(works: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Each work's times; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if turn:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    kernels = choose_kernels(torch.device("cpu"), deterministic=False)
    matrix = torch.randn(VOCABULARY, arguments.width).bfloat16()
    head = kernels.pack(matrix)
    if head is None:
        raise SystemExit("the C++ kernels are not in use: see `graft doctor`")
    # Logits as steep as a model's: the best token has some tenths of the probability.
    hidden = (torch.randn(arguments.rows, arguments.width) * 3.0 / arguments.width**0.5).bfloat16()
    as_bytes = matrix.view(torch.int64)

    def choose(how: dict[str, float]) -> Work:
        draws = [
            TokenDraw(seed=row, answer=0, position=0, min_p=0.0, **how)  # type: ignore[arg-type]
            for row in range(arguments.rows)
        ]

        def work() -> list[int]:
            logits: Tensor = head.linear(hidden, None)
            return kernels.draw_tokens(logits, draws)

        return work

    works: dict[str, Work] = {
        "reading the head": lambda: as_bytes.sum(),
        "product alone": lambda: head.linear(hidden, None),
    }
    works |= {f"product and {name}": choose(how) for name, how in HOWS.items()}
    with torch.inference_mode():
        times = milliseconds(works, arguments.repeats)
    bound = min(times["reading the head"])
    lines = ["| | least | median | least, over reading the head |", "| --- | --- | --- | --- |"]
    for name, own in times.items():
        lines.append(f"| {name} | {min(own):.1f} ms | {statistics.median(own):.1f} ms | {min(own) / bound:.2f} |")
    table = "\n".join(lines)
    print(table)
    write_section(
        "A large vocabulary (`python benchmarks/head_sampling.py`)",
        f"{VOCABULARY} x {arguments.width} in bfloat16, {arguments.rows} rows, {torch.get_num_threads()} threads, "
        f"kernels {kernels.name}. {conditions()}.\n\n{table}\n",
    )


if __name__ == "__main__":
    main()
