"""What does one request gain from four bits?

A generated Llama of TinyLlama's sizes (1.1 billion parameters), in bfloat16 as it is on disk and in NF4; and the demo's
model as its Q4_1 file has it, beside llama.cpp on the same file where llama-cpp-python is installed. One request of 32
prompt and 48 output tokens. Each measurement is a fresh process, and they take turns.

    python benchmarks/quantized_decode.py [--rounds 3] [--python llama.cpp=/path/to/its/python]

Writes its section of benchmarks/RESULTS.md. Some three minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from load import SHAPES, write_checkpoint
from results import conditions, write_section
from vs_peers import MODULES, Cell, installed, measure

from graftlm.demo import demo_model
from graftlm.workload import Workload

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
LLAMA = "llama"
# Ids that all of the models have.
VOCABULARY = 256


def job_of(model: Path, dtype: str, quantization: str | None) -> dict[str, Any]:
    workload = Workload(num_requests=1, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
    return {
        "model": str(model),
        "gguf": str(model),
        "dtype": dtype,
        "quantization": quantization,
        "output_tokens": OUTPUT_TOKENS,
        "prompts": workload.prompts(VOCABULARY),
        "batch_sizes": [1],
        "adapters": {},
        "gguf_adapters": {},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=f"llama.cpp={sys.executable}", metavar="llama.cpp=PATH")
    options = parser.parse_args()
    name, _, peer = options.python.partition("=")
    if name != "llama.cpp":
        parser.error("--python takes llama.cpp=PATH")
    with tempfile.TemporaryDirectory(prefix="graft-quantized-") as folder:
        generated = Path(folder) / "model"
        generated.mkdir()
        write_checkpoint(LLAMA, SHAPES[LLAMA]().num_hidden_layers, generated)
        file = Path(demo_model())
        subjects = {
            ("1.1B, bfloat16", "graft"): job_of(generated, "bfloat16", None),
            ("1.1B, NF4", "graft"): job_of(generated, "bfloat16", "nf4"),
            ("SmolLM2-135M, Q4_1 file", "graft"): job_of(file, "bfloat16", None),
        }
        if installed(peer, MODULES["llama.cpp"]):
            subjects["SmolLM2-135M, Q4_1 file", "llama.cpp"] = job_of(file, "bfloat16", None)
        speeds: dict[tuple[str, str], list[float]] = {subject: [] for subject in subjects}
        for number in range(options.rounds):
            for subject, job in subjects.items():
                system = subject[1]
                try:
                    result = measure(Cell(system, 0), job, sys.executable if system == "graft" else peer, Path(folder))
                except RuntimeError as error:
                    print(f"round {number + 1}: {', '.join(subject)} failed: {error}", file=sys.stderr)
                    continue
                speeds[subject].append(result["tokens_per_second"]["1"])
                print(f"round {number + 1}: {', '.join(subject)}: {speeds[subject][-1]:.1f} tokens/s", file=sys.stderr)
    text = report(speeds)
    print(text)
    write_section("One request in four bits (`python benchmarks/quantized_decode.py`)", text)
    return 0


def report(speeds: dict[tuple[str, str], list[float]]) -> str:
    medians = {subject: statistics.median(values) for subject, values in speeds.items() if values}
    bases = {
        ("1.1B, NF4", "graft"): ("1.1B, bfloat16", "graft"),
        ("SmolLM2-135M, Q4_1 file", "graft"): ("SmolLM2-135M, Q4_1 file", "llama.cpp"),
    }
    lines = [
        f"One request of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, medians of {len(next(iter(speeds.values())))} "
        f"rounds in turn; the prompt's time is counted. {conditions()}.",
        "",
        "| model | system | output tokens per second | over |",
        "| --- | --- | --- | --- |",
    ]
    for subject, speed in medians.items():
        base = bases.get(subject)
        over = "" if base not in medians else f"{speed / medians[base]:.2f} x {', '.join(base)}"
        lines.append(f"| {' | '.join(subject)} | {speed:.1f} | {over} |")
    lines += [f"\n{system} could not be measured on {model}." for (model, system), own in speeds.items() if not own]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
