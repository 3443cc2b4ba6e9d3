"""How much sooner does the first token come when the prefix cache has a long system prompt?

64 requests over four adapters of SmolLM2-135M, each the same 2 000 tokens and then some of its own. Every request goes
to an engine with the prefix cache and to one without, in turn, so that a slow minute of the machine hits both. The
first request of an adapter computes the system prompt, the others find it; tokens have to be the same in both.

    python benchmarks/prefix_cache.py [--requests 64]

Exits with 1 when the first token does not come at least 5 times sooner on a hit, or a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from subject import write_adapters

from graftlm import AsyncLLM, SamplingParams
from graftlm.demo import demo_model

SHARED_LEN, OWN_LEN, OUTPUT_LEN = 2000, 20, 16
NUM_ADAPTERS = 4
ALLOWED_RATIO = 5.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """seconds: to the first token."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int
    seconds: float


async def ask(llm: AsyncLLM, token_ids: Sequence[int], adapter: str) -> Answer:
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    begun, seconds, tokens, num_cached_tokens = time.perf_counter(), 0.0, [], 0
    async for delta in llm.stream({"prompt_token_ids": list(token_ids)}, params, adapter=adapter):
        seconds = seconds or time.perf_counter() - begun
        num_cached_tokens = delta.num_cached_tokens
        tokens += delta.outputs[0].token_ids
    return Answer(token_ids=tuple(tokens), num_cached_tokens=num_cached_tokens, seconds=seconds)


async def compare(paths: Mapping[str, Path], num_requests: int) -> list[tuple[Answer, Answer]]:
    """Of each request, the answers with the prefix cache and without."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 40_000, (SHARED_LEN,), generator=generator).tolist()
    engines = [
        AsyncLLM(demo_model(), quantization="none", adapters=paths, kv_cache_bytes=2 << 30, prefix_cache=prefix_cache)
        for prefix_cache in (True, False)
    ]
    answers = []
    for index in range(num_requests):
        prompt = shared + torch.randint(0, 40_000, (OWN_LEN,), generator=generator).tolist()
        cached, plain = [await ask(llm, prompt, f"a{index % NUM_ADAPTERS}") for llm in engines]
        answers.append((cached, plain))
    for llm in engines:
        await llm.shutdown()
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder))
        paths = {f"a{index}": Path(folder) / f"a{index}" for index in range(NUM_ADAPTERS)}
        answers = asyncio.run(compare(paths, options.requests))
    hits = [cached for cached, _ in answers[NUM_ADAPTERS:]]
    slow = statistics.median(plain.seconds for _, plain in answers)
    fast = statistics.median(hit.seconds for hit in hits)
    equal = all(cached.token_ids == plain.token_ids for cached, plain in answers)
    print(f"{options.requests} requests, {NUM_ADAPTERS} adapters, {SHARED_LEN} shared tokens")
    print(f"cached tokens of a hit: {min(hit.num_cached_tokens for hit in hits)} or more")
    print(f"first token without the cache {1000 * slow:.0f} ms, on a hit {1000 * fast:.0f} ms (medians)")
    print(f"ratio {slow / fast:.1f} (allowed: at least {ALLOWED_RATIO:g}); tokens {'equal' if equal else 'DIFFER'}")
    return 0 if equal and slow >= ALLOWED_RATIO * fast else 1


if __name__ == "__main__":
    sys.exit(main())
