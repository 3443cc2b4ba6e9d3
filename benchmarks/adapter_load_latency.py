"""What do running streams notice of an adapter that is being read?

Eight streams over SmolLM2-135M and three small adapters generate without a pause. Meanwhile one of two adapters of
100 MB each is asked for; memory holds one of them, so each time the other has to be read from disk, checked and
compiled. The time between two tokens of the streams while that goes on is compared with that just before, and the
median of these ratios is shown, beside what the cold request itself waited.

    python benchmarks/adapter_load_latency.py [--repeats 15] [--streams 8]

Exits with 1 when the median rises by 20 % or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from subject import PROJECTIONS, load_reference

from graftlm import AsyncLLM, SamplingParams
from graftlm.demo import demo_model

ALLOWED_RISE = 0.20
COLD_BYTES = 100_000_000
SMALL_RANK = 8
# Quiet tokens to compare with, before each load.
QUIET_TOKENS = 8
MANY_TOKENS = 7000
PROMPT = {"prompt_token_ids": [504, 253, 11, 28, 30, 260]}


def write_adapters(folder: Path) -> dict[str, Path]:
    """Three small adapters and two of 100 MB, random, as PEFT saves them."""
    model = peft.get_peft_model(
        load_reference("float32"),
        peft.LoraConfig(r=SMALL_RANK, lora_alpha=SMALL_RANK, target_modules=PROJECTIONS, task_type="CAUSAL_LM"),
    )
    model.save_pretrained(folder / "pattern", save_embedding_layers=False)
    shapes = load_file(folder / "pattern" / "adapter_model.safetensors")
    config = json.loads((folder / "pattern" / "adapter_config.json").read_text())
    small_bytes = sum(tensor.nbytes for tensor in shapes.values())

    def write(name: str, rank: int, seed: int) -> Path:
        path, generator = folder / name, torch.Generator().manual_seed(seed)
        path.mkdir()
        tensors = {
            key: 0.01
            * torch.randn([rank if size == SMALL_RANK else size for size in tensor.shape], generator=generator)
            for key, tensor in shapes.items()
        }
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({**config, "r": rank, "lora_alpha": rank}))
        return path

    cold_rank = round(SMALL_RANK * COLD_BYTES / small_bytes)
    ranks = {
        "small-0": SMALL_RANK,
        "small-1": SMALL_RANK,
        "small-2": SMALL_RANK,
        "cold-0": cold_rank,
        "cold-1": cold_rank,
    }
    return {name: write(name, rank, seed) for seed, (name, rank) in enumerate(ranks.items())}


@dataclass(frozen=True, kw_only=True)
class Load:
    """quiet, loading: seconds between two tokens. longest: of those while loading. wait: of the cold request."""

    quiet: float
    loading: float
    longest: float
    wait: float


class Streams:
    """Streams that never end, and when their tokens came."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.times: list[float] = []
        self._arrived = asyncio.Event()

    async def run(self, adapter: str | None, *, is_watched: bool) -> None:
        params = SamplingParams(max_tokens=MANY_TOKENS, temperature=0, ignore_eos=True)
        async for _ in self._llm.stream(PROMPT, params, adapter=adapter):
            # All of them get a token in every step: one is enough to see the steps.
            if is_watched:
                self.times.append(time.perf_counter())
                self._arrived.set()

    async def tokens(self, count: int) -> None:
        """Wait for that many more."""
        goal = len(self.times) + count
        while len(self.times) < goal:
            self._arrived.clear()
            await self._arrived.wait()

    def gaps(self, start: float, stop: float) -> list[float]:
        """Between tokens of which the second came within this time."""
        return [later - earlier for earlier, later in pairwise(self.times) if start <= later <= stop]


async def measure(llm: AsyncLLM, num_streams: int, repeats: int) -> list[Load]:
    streams = Streams(llm)
    adapters = [None, "small-0", "small-1", "small-2"]
    running = [
        asyncio.ensure_future(streams.run(adapters[index % len(adapters)], is_watched=index == 0))
        for index in range(num_streams)
    ]
    once = SamplingParams(max_tokens=1, temperature=0)
    await streams.tokens(QUIET_TOKENS)
    loads = []
    for index in range(repeats + 1):
        quiet_from = streams.times[-1]
        await streams.tokens(QUIET_TOKENS)
        asked = time.perf_counter()
        await llm.generate(PROMPT, once, adapter=f"cold-{index % 2}")
        answered = time.perf_counter()
        quiet, loading = streams.gaps(quiet_from + 1e-9, asked), streams.gaps(asked, answered)
        loads.append(
            Load(
                quiet=statistics.mean(quiet),
                loading=statistics.mean(loading),
                longest=max(loading),
                wait=answered - asked,
            )
        )
        # What reading has left behind is not part of the next quiet time.
        await streams.tokens(2)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return loads[1:]


async def compare(paths: Mapping[str, Path], num_streams: int, repeats: int) -> list[Load]:
    llm = AsyncLLM(
        demo_model(), quantization="none", adapters=paths, adapter_memory_bytes=160_000_000, kv_cache_bytes=1 << 30
    )
    try:
        return await measure(llm, num_streams, repeats)
    finally:
        await llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loads = asyncio.run(compare(write_adapters(Path(folder)), options.streams, options.repeats))
    rise = statistics.median(load.loading / load.quiet for load in loads) - 1
    for name in ("quiet", "loading", "longest", "wait"):
        print(
            f"{name}: {1000 * statistics.median(getattr(load, name) for load in loads):.0f} ms (median of {len(loads)})"
        )
    print(
        f"between two tokens while an adapter loads: {100 * rise:+.1f} % (allowed: below +{100 * ALLOWED_RISE:.0f} %)"
    )
    return 0 if rise < ALLOWED_RISE else 1


if __name__ == "__main__":
    sys.exit(main())
