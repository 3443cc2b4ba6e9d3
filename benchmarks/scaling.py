"""Does cost grow with the tokens that are computed, and with nothing else?

A generated Llama (8 layers, 512 wide, vocabulary of 8 192) decodes with one thing changed at a time: rows 1 to 64, 1 to
32 active adapters, 1 to 256 resident adapters of which 8 are active, ranks 4 to 128, contexts 128 to 8 192. The points
of one line take turns over the repeats, so a slow minute of the machine hits all of them. Shown is the median time of a
decode step, and what it is of the line's first.

    python benchmarks/scaling.py [--dtype bfloat16|float32] [--repeats 3] [--quick]

Writes its section of benchmarks/RESULTS.md, but for --quick.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from results import conditions, write_section
from subject import RANK, write_adapters

from graftlm.config import EngineConfig
from graftlm.engine.engine import Engine
from graftlm.workload import Workload, measure_workloads

OUTPUT_TOKENS, PROMPT_TOKENS = 16, 32
MAX_CONTEXT = 8192 + OUTPUT_TOKENS
# Many of them have to fit on disk and in memory.
RESIDENT_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The points of each line."""

    rows: tuple[int, ...]
    active: tuple[int, ...]
    resident: tuple[int, ...]
    ranks: tuple[int, ...]
    contexts: tuple[int, ...]


FULL = Extent(
    rows=(1, 2, 4, 8, 16, 32, 64),
    active=(1, 2, 4, 8, 16, 32),
    resident=(8, 32, 128, 256),
    ranks=(4, 8, 16, 32, 64, 128),
    contexts=(128, 512, 2048, 8192),
)
QUICK = Extent(rows=(1, 4), active=(1, 4), resident=(8, 12), ranks=(4, 16), contexts=(128, 512))


@dataclass(frozen=True, kw_only=True)
class Line:
    """name: what is changed. points: value -> median seconds of a decode step."""

    name: str
    fixed: str
    points: dict[int, float]


def write_model(folder: Path, dtype: str) -> Path:
    """A random Llama and the tokenizer of nobody: prompts are token ids."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=MAX_CONTEXT, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@contextmanager
def opened(model: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=model, adapters=adapters, prefix_cache=False, kv_cache_bytes=1 << 30))
    try:
        yield engine
    finally:
        engine.close()


def workload(*, rows: int = 8, adapters: tuple[str, ...] = (), context: int = PROMPT_TOKENS) -> Workload:
    return Workload(num_requests=rows, prompt_tokens=context, output_tokens=OUTPUT_TOKENS, adapters=adapters)


def line(engine: Engine, name: str, fixed: str, points: dict[int, Workload], repeats: int) -> Line:
    measured = measure_workloads(engine, list(points.values()), repeats=repeats)
    seconds = [each.medians.decode_step_seconds for each in measured.workloads]
    return Line(
        name=name,
        fixed=fixed,
        points={value: taken for value, taken in zip(points, seconds, strict=True) if taken is not None},
    )


def measure_rows(engine: Engine, extent: Extent, repeats: int) -> Line:
    points = {rows: workload(rows=rows) for rows in extent.rows}
    return line(engine, "rows", "no adapter", points, repeats)


def measure_active(engine: Engine, extent: Extent, repeats: int) -> Line:
    rows = max(extent.active)
    points = {count: workload(rows=rows, adapters=tuple(list(engine.adapters)[:count])) for count in extent.active}
    return line(engine, "active adapters", f"{rows} rows, rank {RANK}", points, repeats)


def measure_contexts(engine: Engine, extent: Extent, repeats: int) -> Line:
    points = {context: workload(rows=4, context=context) for context in extent.contexts}
    return line(engine, "context", "4 rows", points, repeats)


def measure_resident(model: Path, adapters: dict[str, Path], extent: Extent, repeats: int) -> Line:
    """The same workload in engines that hold more and more: those that are open at a time take turns."""
    active = tuple(adapters)[: min(extent.resident)]
    taken: dict[int, list[float]] = {count: [] for count in extent.resident}
    with opened(model, {name: adapters[name] for name in active}) as engine:
        # More are loaded from round to round, and taken away again, so that each count is seen early and late.
        for _ in range(repeats):
            for count in extent.resident:
                for name, path in list(adapters.items())[len(engine.adapters) : count]:
                    engine.load_adapter(name, path)
                asked = workload(rows=len(active), adapters=active)
                [measured] = measure_workloads(engine, [asked], repeats=1).workloads
                if measured.medians.decode_step_seconds is not None:
                    taken[count].append(measured.medians.decode_step_seconds)
            for name in list(engine.adapters)[len(active) :]:
                engine.unload_adapter(name)
    return Line(
        name="resident adapters",
        fixed=f"{len(active)} active, {len(active)} rows, rank {RESIDENT_RANK}",
        points={count: statistics.median(seconds) for count, seconds in taken.items()},
    )


def measure_ranks(model: Path, folder: Path, extent: Extent, repeats: int) -> Line:
    by_rank = {rank: write_adapters(folder / f"rank-{rank}", model=model, count=8, rank=rank) for rank in extent.ranks}
    named = {rank: {f"r{rank}-{name}": path for name, path in own.items()} for rank, own in by_rank.items()}
    with opened(model, {name: path for own in named.values() for name, path in own.items()}) as engine:
        points = {rank: workload(adapters=tuple(own)) for rank, own in named.items()}
        return line(engine, "rank", "8 adapters, 8 rows", points, repeats)


def table(lines: list[Line]) -> str:
    """In Markdown; cost in milliseconds, and times the line's first."""
    rows = ["| changed | fixed | decode step in ms, and over the first |", "| --- | --- | --- |"]
    for each in lines:
        first = next(iter(each.points.values()))
        shown = ", ".join(
            f"{value}: {1000 * seconds:.2f} ({seconds / first:.2f})" for value, seconds in each.points.items()
        )
        rows.append(f"| {each.name} | {each.fixed} | {shown} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    extent, repeats = (QUICK, 1) if options.quick else (FULL, options.repeats)
    with tempfile.TemporaryDirectory(prefix="graft-scaling-") as name:
        folder = Path(name)
        model = write_model(folder / "model", options.dtype)
        active = write_adapters(folder / "active", model=model, count=max(extent.active))
        resident = write_adapters(folder / "resident", model=model, count=max(extent.resident), rank=RESIDENT_RANK)
        with opened(model, active) as engine:
            measures: list[Callable[[Engine, Extent, int], Line]] = [measure_rows, measure_active, measure_contexts]
            lines = [measure(engine, extent, repeats) for measure in measures]
        lines.append(measure_resident(model, resident, extent, repeats))
        lines.append(measure_ranks(model, folder, extent, repeats))
    text = f"Llama of 8 layers, 512 wide, {options.dtype}, medians of {repeats}. {conditions()}.\n\n{table(lines)}"
    print(text)
    if not options.quick:
        write_section("What cost grows with (`python benchmarks/scaling.py`)", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
