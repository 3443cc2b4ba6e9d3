"""How long do running streams pause when a long prompt arrives?

Eight streams over SmolLM2-135M generate without a pause, and prompts of 2 000 tokens arrive one after the other. A step
computes at most `max_num_batched_tokens` tokens (512 here), and sequences that decode go first: two tokens of a stream
are to be at most one such step apart. The longest pause of all streams while a prompt is computed is compared with the
mean step of the same prompt when it has the engine to itself, measured just before.

    python benchmarks/inter_token_latency.py [--repeats 3] [--streams 8] [--dtype float32|bfloat16]

Exits with 1 when, at the median of the repeats, the longest pause is more than 1.5 steps: the last step of a prompt
takes longer than its mean, and a second step would make it 2.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from adapter_load_latency import QUIET_TOKENS, Streams

from graftlm import AsyncLLM, SamplingParams
from graftlm.demo import demo_model

ALLOWED_RATIO = 1.5
BUDGET = 512
LONG_PROMPT = 2000
ONCE = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Seconds. step: of a step of the full budget. quiet: between two tokens before. pause: the longest while the
    prompt was computed."""

    step: float
    quiet: float
    pause: float


async def time_prompt(llm: AsyncLLM, token_ids: list[int]) -> tuple[float, float]:
    """When it was sent, and when its answer came."""
    begun = time.perf_counter()
    await llm.generate({"prompt_token_ids": token_ids}, ONCE)
    return begun, time.perf_counter()


async def arrive(llm: AsyncLLM, num_streams: int, token_ids: list[int]) -> Arrival:
    alone_from, alone_until = await time_prompt(llm, token_ids)
    streams = [Streams(llm) for _ in range(num_streams)]
    running = [asyncio.ensure_future(each.run(None, is_watched=True)) for each in streams]
    await asyncio.gather(*(each.tokens(QUIET_TOKENS) for each in streams))
    begun, answered = await time_prompt(llm, token_ids)
    await asyncio.gather(*(each.tokens(1) for each in streams))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return Arrival(
        step=(alone_until - alone_from) / math.ceil(LONG_PROMPT / BUDGET),
        quiet=statistics.median(streams[0].gaps(streams[0].times[0], begun)),
        pause=max(max(each.gaps(begun, answered)) for each in streams),
    )


async def measure(num_streams: int, repeats: int, dtype: Any) -> list[Arrival]:
    llm = AsyncLLM(
        demo_model(),
        quantization="none",
        dtype=dtype,
        kv_cache_bytes=1 << 30,
        max_num_batched_tokens=BUDGET,
        prefix_cache=False,
    )
    generator = torch.Generator().manual_seed(0)
    try:
        return [
            await arrive(llm, num_streams, torch.randint(0, 40_000, (LONG_PROMPT,), generator=generator).tolist())
            for _ in range(repeats)
        ]
    finally:
        await llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    arrivals = asyncio.run(measure(options.streams, options.repeats, options.dtype))
    for name in ("step", "quiet", "pause"):
        print(f"{name}: {1000 * statistics.median(getattr(each, name) for each in arrivals):.0f} ms (median)")
    ratio = statistics.median(each.pause / each.step for each in arrivals)
    print(f"longest pause of {options.streams} streams: {ratio:.2f} steps (allowed: {ALLOWED_RATIO:g})")
    return 0 if ratio <= ALLOWED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
