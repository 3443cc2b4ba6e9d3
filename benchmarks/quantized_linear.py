"""What does a product with each quantised format cost, beside bfloat16 and bitsandbytes?

One matrix of random numbers, laid out as for serving, times 1, 8, 32 and 256 rows in bfloat16. All formats take turns
within each repeat, so a slow minute of the machine hits all of them. Shown are the median time, the bytes of the weight
read in it, and the time over bfloat16's. Figures of several threads mean something only where nothing else runs.

    python benchmarks/quantized_linear.py [--size 2048] [--repeats 15]

Writes its section of benchmarks/RESULTS.md. Half a minute.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import bitsandbytes
import torch
from results import conditions, write_section
from torch import Tensor

from graftlm.kernels.registry import choose_kernels
from graftlm.quantization import Weight
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.gguf import GGUFWeight
from graftlm.quantization.gguf_blocks import BLOCK_TYPES
from graftlm.quantization.packed import coded_weight, dense_weight
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.round_to_nearest import RoundToNearest
from graftlm.quantization.scale_grid import ScaleGrid
from graftlm.quantization.scaled_e2m1 import ScaledE2M1
from graftlm.quantization.scaled_float8 import ScaledFloat8

ROWS = (1, 8, 32, 256)
DTYPE = torch.bfloat16
KERNELS = choose_kernels(torch.device("cpu"), deterministic=False)
BASELINE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """matmul: inputs [T, in] -> [T, out]. num_bytes: of the weight."""

    matmul: Callable[[Tensor], Tensor]
    num_bytes: int


def laid_out(weight: Weight) -> Subject:
    coded = coded_weight(weight, KERNELS, dtype=DTYPE)
    return Subject(matmul=coded.matmul, num_bytes=coded.num_bytes)


def float8(matrix: Tensor, block: tuple[int, int]) -> ScaledFloat8:
    rows, columns = matrix.shape
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    grid = ScaleGrid(
        scale=scale,
        row_groups=torch.arange(rows, dtype=torch.int32) // block[0],
        columns=ColumnGroups(columns=columns, size=block[1]),
    )
    return ScaledFloat8(values=matrix.to(torch.float8_e4m3fn), grid=grid, dtype=DTYPE)


def four_bit_floats(matrix: Tensor, scale: torch.dtype, size: int) -> ScaledE2M1:
    """Random codes."""
    rows, columns = matrix.shape
    return ScaledE2M1(
        codes=PackedCodes.from_bytes(torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8), columns, 4),
        scale=(torch.rand(rows, columns // size) + 0.5).to(scale),
        global_scale=torch.ones(1),
        columns=ColumnGroups(columns=columns, size=size),
        dtype=DTYPE,
    )


def blocks(matrix: Tensor, kind: str) -> GGUFWeight:
    """Random bytes, small enough that no float16 among them is infinite."""
    rows, columns = matrix.shape
    row_bytes = columns // BLOCK_TYPES[kind].weights * BLOCK_TYPES[kind].num_bytes
    return GGUFWeight(torch.randint(0, 64, (rows, row_bytes)).to(torch.uint8), BLOCK_TYPES[kind], dtype=DTYPE)


def fused_four_bit(matrix: Tensor) -> Subject:
    """bitsandbytes' own product. Its first call brings the weight into the order it wants."""
    rows, columns = matrix.shape
    layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, compute_dtype=DTYPE, quant_type="nf4")
    layer.weight = bitsandbytes.nn.Params4bit(matrix.to(DTYPE), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu").eval()
    return Subject(matmul=layer, num_bytes=matrix.numel() * 9 // 16)


def fused_eight_bit(matrix: Tensor) -> Subject:
    rows, columns = matrix.shape
    layer = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bitsandbytes.nn.Int8Params(matrix.to(DTYPE), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu").eval()
    return Subject(matmul=layer, num_bytes=matrix.numel() + 4 * rows)


def make_subjects(size: int) -> dict[str, Subject]:
    matrix = torch.randn(size, size) / size**0.5
    dense = dense_weight(matrix.to(DTYPE), KERNELS)
    weights: dict[str, Weight] = {
        **{name: QUANTIZERS[name].quantize(matrix, dtype=DTYPE) for name in ("nf4", "nf4-double", "int8")},
        "gptq int4, groups of 128": RoundToNearest().quantize(matrix, dtype=DTYPE),
        "fp8, a scale per row": float8(matrix, (1, size)),
        "fp8, blocks of 128": float8(matrix, (128, 128)),
        "mxfp4": four_bit_floats(matrix, torch.float8_e8m0fnu, 32),
        "nvfp4": four_bit_floats(matrix, torch.float8_e4m3fn, 16),
        **{f"gguf {kind}": blocks(matrix, kind) for kind in ("Q4_0", "Q4_K", "Q6_K", "Q8_0")},
    }
    return {
        BASELINE: Subject(matmul=dense.matmul, num_bytes=dense.num_bytes),
        **{name: laid_out(weight) for name, weight in weights.items()},
        "nf4, bitsandbytes": fused_four_bit(matrix),
        "int8, bitsandbytes": fused_eight_bit(matrix),
    }


def measure(subjects: dict[str, Subject], size: int, repeats: int) -> dict[str, dict[int, float]]:
    """Median seconds of a product, by subject and rows."""
    taken: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in subjects}
    inputs = {rows: torch.randn(rows, size).to(DTYPE) for rows in ROWS}
    for repeat in range(repeats + 1):
        for rows, x in inputs.items():
            for name, subject in subjects.items():
                start = time.perf_counter()
                subject.matmul(x)
                seconds = time.perf_counter() - start
                if repeat:
                    taken[name][rows].append(seconds)
    return {name: {rows: statistics.median(seconds) for rows, seconds in each.items()} for name, each in taken.items()}


def table(subjects: dict[str, Subject], medians: dict[str, dict[int, float]]) -> str:
    """In Markdown."""
    heads = " | ".join(f"{rows} rows" if rows > 1 else "1 row" for rows in ROWS)
    lines = [f"| weight | bits | {heads} |", "| --- | --- |" + " --- |" * len(ROWS)]
    elements = subjects[BASELINE].num_bytes * 8 / 16
    for name, subject in subjects.items():
        cells = []
        for rows in ROWS:
            seconds = medians[name][rows]
            share = seconds / medians[BASELINE][rows]
            cells.append(f"{1000 * seconds:.3f} ms, {subject.num_bytes / seconds / 1e9:.1f} GB/s, {share:.2f}")
        lines.append(f"| {name} | {8 * subject.num_bytes / elements:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrix, a multiple of 256")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if options.size <= 0 or options.size % 256 or options.repeats <= 0:
        parser.error("--size takes a positive multiple of 256, --repeats a positive number")
    # It says with every product that inputs are cast to float16.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    torch.manual_seed(0)
    subjects = make_subjects(options.size)
    with torch.inference_mode():
        medians = measure(subjects, options.size, options.repeats)
    text = (
        f"{options.size} x {options.size}, inputs in bfloat16, medians of {options.repeats}; kernels {KERNELS.name}, "
        f"{torch.get_num_threads()} threads. Each cell: time, weight read in it, and the time over bfloat16's. "
        f"{conditions()}.\n\n{table(subjects, medians)}"
    )
    print(text)
    write_section("Products with quantised weights (`python benchmarks/quantized_linear.py`)", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
