"""How much memory does loading take, against the weights that are kept?

A checkpoint of about 1.1 billion parameters in bfloat16 is generated and loaded in a fresh process: Llama-shaped (q, k
and v, gate and up are stacked on the way) and GPT-2-shaped (every matrix is transposed). Shown are three peaks, each
less what the process held before loading (the interpreter and torch), as multiples of the weights kept: resident memory
as the kernel counts it (VmHWM), of it anonymous memory, and of it mapped pages of files, which count as resident while
they are read. The last two are polled, and need not be of the same moment.

    python benchmarks/load.py [--shapes llama gpt2 …] [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from graftlm import LLM
from graftlm.config import DType

ALLOWED = 1.15
MIB = 1 << 20
KV_CACHE_BYTES = 16 * MIB
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


def write_checkpoint(shape: str, folder: Path) -> int:
    """Random values in one file, which loads worst: every page of it may stay mapped. Returns how many there are."""
    config = SHAPES[shape]()
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
    return sum(tensor.numel() for tensor in tensors.values())


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


def work(folder: Path, dtype: DType) -> None:
    """Load the checkpoint; print what it took, in bytes."""
    (before,) = status("VmRSS")
    with polled_peaks("RssAnon", "RssFile") as peaks:
        llm = LLM(folder, dtype=dtype, kv_cache_bytes=KV_CACHE_BYTES, max_model_len=16)
    # Not getrusage's peak: that of a new process begins with its parent's.
    (peak,) = status("VmHWM")
    print(json.dumps({"before": before, "peak": peak - before, "anonymous": peaks[0], "mapped": peaks[1]}))
    llm.shutdown()


def measure(shape: str, dtype: DType) -> bool:
    """Print one row of the table; whether memory stayed within what is allowed."""
    with tempfile.TemporaryDirectory() as name:
        num_parameters = write_checkpoint(shape, Path(name))
        command = [sys.executable, __file__, "--worker", name, "--dtype", dtype]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    kept = num_parameters * torch.empty((), dtype=getattr(torch, dtype)).element_size()
    peak, anonymous, mapped = (found[key] / kept for key in ("peak", "anonymous", "mapped"))
    print(
        f"| {shape} | {num_parameters / 1e9:.2f} B | {kept / MIB:.0f} MiB | {found['before'] / MIB:.0f} MiB "
        f"| {peak:.3f} | {anonymous:.3f} | {mapped:.3f} |"
    )
    return peak <= ALLOWED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.dtype)
        return 0
    print(f"{platform.platform()}, torch {torch.__version__}, safetensors in bfloat16, loaded as {options.dtype}\n")
    print("| shape | parameters | weights kept | before | peak | anonymous | mapped |")
    print("|---|---|---|---|---|---|---|")
    within = [measure(shape, options.dtype) for shape in options.shapes]
    print(f"\npeaks of at most {ALLOWED} times the weights: {sum(within)} of {len(within)}")
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
