"""What does loading take: memory, against the weights that are kept, and time, against reading the file?

A checkpoint in bfloat16 with the widths of 1.1 billion parameters is generated and loaded in a fresh process:
Llama-shaped (q, k and v, gate and up are stacked on the way) and GPT-2-shaped (every matrix is transposed). The file is
read into memory before and after, and the mean counts; loading, too, finds it in the page cache. Shown are three peaks,
each less what the process held before loading (the interpreter and torch), as multiples of the weights kept: resident
memory as the kernel counts it (VmHWM), of it anonymous memory, and of it mapped pages of files, which count as resident
while they are read. The last two are polled, and need not be of the same moment.

With --quantization a second process loads the same checkpoint again, from the cache that the first one wrote. Then one
decoder layer in full precision is allowed on top, and the bytes that a quantised weight takes are shown.

    python benchmarks/load.py [--shapes llama gpt2 …] [--dtype bfloat16|float32] [--layers 4]
                              [--quantization nf4 nf4-double fp4 fp4-double int8]

Writes its section of benchmarks/RESULTS.md. A minute.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from results import conditions, write_section
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from graftlm import LLM
from graftlm.config import DType, Quantization
from graftlm.models.quantized_modules import QuantizedModules

ALLOWED = 1.15
ALLOWED_TIME = 1.5
MIB = 1 << 20
KV_CACHE_BYTES = 16 * MIB
LAYER_0 = re.compile(r"\.(layers|h)\.0\.")
# Bytes per quantised weight, scales and all.
ALLOWED_BYTES: dict[Quantization, float] = {
    "nf4": 0.57,
    "nf4-double": 0.53,
    "fp4": 0.57,
    "fp4-double": 0.53,
    "int8": 1.01,
}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    # TinyLlama's sizes.
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    # A fifth of the parameters are the embedding, and another fifth the head.
    "llama-large-vocabulary": lambda: transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=10,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=2048, n_head=16, n_layer=20),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Numbers of parameters: all, and those of one decoder layer."""

    parameters: int
    layer_parameters: int


def write_checkpoint(shape: str, num_layers: int, folder: Path) -> Size:
    """Random values in one file, which loads worst: every page of it may stay mapped."""
    config = SHAPES[shape]()
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(MIB, generator=generator).mul_(0.02).bfloat16()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {
        name: noise.repeat(-(-parameter.numel() // MIB))[: parameter.numel()].view(parameter.shape)
        for name, parameter in model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    words = {f"t{index}": index for index in range(256)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0"))).save_pretrained(folder)
    return Size(
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        layer_parameters=sum(tensor.numel() for name, tensor in tensors.items() if LAYER_0.search(name)),
    )


class QuantizedCount(logging.Handler):
    """Takes from the log how much was quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.found = QuantizedModules()

    def emit(self, record: logging.LogRecord) -> None:
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, QuantizedModules):
                self.found = argument


def status(*fields: str) -> tuple[int, ...]:
    """Fields of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[field].split()[0]) * 1024 for field in fields)


@contextmanager
def polled_peaks(*fields: str) -> Iterator[list[int]]:
    """Largest values of /proc/self/status's fields while the block runs, less those at its start."""
    start, peaks, done = status(*fields), [0] * len(fields), threading.Event()

    def poll() -> None:
        while not done.wait(0.002):
            for index, value in enumerate(status(*fields)):
                peaks[index] = max(peaks[index], value - start[index])

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def work(folder: Path, dtype: DType, quantization: Quantization | None) -> None:
    """Load the checkpoint; print what it took, in bytes and seconds."""
    count, log = QuantizedCount(), logging.getLogger("graftlm.models")
    log.setLevel(logging.INFO)
    log.addHandler(count)
    (before,) = status("VmRSS")
    started = time.perf_counter()
    with polled_peaks("RssAnon", "RssFile") as peaks:
        llm = LLM(folder, dtype=dtype, quantization=quantization, kv_cache_bytes=KV_CACHE_BYTES, max_model_len=16)
    seconds = time.perf_counter() - started
    # Not getrusage's peak: that of a new process begins with its parent's.
    (peak,) = status("VmHWM")
    found = {"before": before, "peak": peak - before, "anonymous": peaks[0], "mapped": peaks[1], "seconds": seconds}
    found |= {"quantized": count.found.num_weights, "quantized_bytes": count.found.num_bytes}
    print(json.dumps(found))
    llm.shutdown()


def reading_seconds(folder: Path) -> float:
    """How long it takes to read the checkpoint into memory that is new, as that of weights is."""
    started = time.perf_counter()
    (folder / "model.safetensors").read_bytes()
    return time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """row: of the table. is_small: whether memory stayed within what is allowed."""

    row: str
    is_small: bool
    is_fast: bool


def measure(folder: Path, size: Size, name: str, dtype: DType, quantization: Quantization | None) -> Outcome:
    """Load the checkpoint in a fresh process."""
    command = [sys.executable, __file__, "--worker", str(folder), "--dtype", dtype]
    if quantization is not None:
        command += ["--quantization", quantization]
    environment = {**os.environ, "GRAFT_CACHE": str(folder / "cache")}
    before = reading_seconds(folder)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    reading = (before + reading_seconds(folder)) / 2
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    itemsize = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    kept = (size.parameters - found["quantized"]) * itemsize + found["quantized_bytes"]
    allowed, per_weight, within = ALLOWED * kept, "", True
    if quantization is not None:
        allowed += size.layer_parameters * itemsize
        bytes_per_weight = found["quantized_bytes"] / found["quantized"]
        per_weight, within = f"{bytes_per_weight:.4f}", bytes_per_weight <= ALLOWED_BYTES[quantization]
    peak, anonymous, mapped = (found[key] / kept for key in ("peak", "anonymous", "mapped"))
    row = (
        f"| {name} | {size.parameters / 1e9:.2f} B | {kept / MIB:.0f} MiB | {per_weight} "
        f"| {found['before'] / MIB:.0f} MiB | {peak:.3f} | {allowed / kept:.3f} | {anonymous:.3f} | {mapped:.3f} "
        f"| {found['seconds']:.1f} | {reading:.1f} | {found['seconds'] / reading:.2f} |"
    )
    is_small, is_fast = within and found["peak"] <= allowed, found["seconds"] <= ALLOWED_TIME * reading
    return Outcome(row=row, is_small=is_small, is_fast=is_fast)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=8, help="of each shape")
    parser.add_argument("--quantization", nargs="+", default=[None], choices=ALLOWED_BYTES)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.dtype, options.quantization[0])
        return 0
    lines = [
        "| shape | parameters | weights kept | bytes per weight | before | peak | allowed | anonymous | mapped "
        "| seconds | reading the file | ratio |",
        "| --- |" + " --- |" * 11,
    ]
    outcomes = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            size = write_checkpoint(shape, options.layers, Path(name))
            for quantization in options.quantization:
                starts = [shape] if quantization is None else [f"{shape}, {quantization}", "the same, cached"]
                for start in starts:
                    outcomes.append(measure(Path(name), size, start, options.dtype, quantization))
                    lines.append(outcomes[-1].row)
                    print(lines[-1], flush=True)
    small, fast = sum(outcome.is_small for outcome in outcomes), sum(outcome.is_fast for outcome in outcomes)
    text = (
        f"{options.layers} layers, loaded as {options.dtype}. {conditions()}.\n\n" + "\n".join(lines) + "\n\n"
        f"Within the memory allowed: {small} of {len(outcomes)}; within {ALLOWED_TIME} times reading the file: "
        f"{fast} of {len(outcomes)}."
    )
    print(text)
    write_section("Loading (`python benchmarks/load.py`)", text)
    return 0 if small == fast == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
