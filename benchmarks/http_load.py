"""Does the server hold under load, and what does it spend beside the model?

Streaming clients in a process of their own ask eight adapters the same few things again and again, half of them for an
answer of a certain form; each answer is compared with the one that the same request gets alone. Processor time of the
server's process is split into the model's (the forward pass), the sampler's, and all the rest by threads: of the engine
(scheduling, detokenising), of the event loop (JSON, HTTP), and those of masks, grammars and tokenising. Torch runs on
one thread: the time of the engine's thread is all of the model's. These are seconds of processors, so it matters little
what else the machine does. With --tiny a random model takes the real one's place, beside which nothing is cheap.

    python benchmarks/http_load.py [--requests 1000] [--clients 50] [--tokens 16] [--seconds 200] [--tiny]

After --seconds no request is begun; how many were answered is said then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from subject import write_adapters

from graftlm import AsyncLLM
from graftlm.demo import demo_model

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.engine.rig import core
from tests.server.live_server import LiveServer, serving
from tests.tiny import edit_json, make_adapter, make_llama

NUM_ADAPTERS, ALPHA = 8, 64
PROMPTS = ("The capital of France is", "Once upon a time there was a", "To boil an egg, you first")
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[A-Za-z ,.]{20,200}"},
    {
        "json": {
            "type": "object",
            "properties": {"title": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
            "required": ["title", "tags"],
            "additionalProperties": False,
        }
    },
    {"choice": [f"answer number {index}" for index in range(100)]},
)
TARGET_SHARE = 0.15
# By the names of their threads.
PARTS = {
    "graft-engine": "engine",
    "server under test": "event loop",
    "graft-masks": "masks",
    "graft-grammars": "grammars",
    "asyncio": "tokenising",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients do: `order` says which body each request sends. seconds: after which none is begun."""

    url: str
    bodies: Sequence[dict[str, Any]]
    order: Sequence[int]
    num_clients: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """texts: of each request that was begun, in order; None where it failed. num_tokens: of all of them. seconds: until
    the last was answered."""

    texts: list[str | None]
    num_tokens: int
    seconds: float


@dataclass(kw_only=True)
class EngineTime:
    """Processor seconds of the engine's thread in the forward pass and in the sampler."""

    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "sampler": 0.0})

    def watch(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds[part] += time.thread_time() - begun

        return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(Path(folder), tiny=arguments.tiny)
        with serving(llm) as live:
            return run(llm, live, arguments)


def make_engine(folder: Path, *, tiny: bool) -> AsyncLLM:
    names = [f"a{index}" for index in range(NUM_ADAPTERS)]
    adapters = {name: folder / name for name in names}
    if tiny:
        base = make_llama(folder / "base")
        for seed, path in enumerate(adapters.values()):
            make_adapter(base, path, seed=seed)
        return AsyncLLM(base, adapters=adapters)
    for path in write_adapters(folder).values():
        # So loud that each says something else.
        edit_json(path / "adapter_config.json", lora_alpha=ALPHA)
    return AsyncLLM(demo_model(), adapters=adapters, dtype="float32", quantization="none", max_model_len=256)


def run(llm: AsyncLLM, live: LiveServer, arguments: argparse.Namespace) -> int:
    free = [
        {"model": name, "prompt": prompt, "max_tokens": arguments.tokens, "temperature": 0, "ignore_eos": True}
        for name, prompt in zip(llm.adapters, itertools.cycle(PROMPTS), strict=False)
    ]
    formed = [{**body, "structured_outputs": form} for body, form in zip(free, itertools.cycle(FORMS), strict=False)]
    bodies = free + formed
    alone = [live.text(**body) for body in bodies]
    assert len(set(alone[: len(free)])) == len(free), "the adapters answer alike: a mix-up would not be seen"
    order = random.Random(0).choices(range(len(bodies)), k=arguments.requests)
    load = Load(url=live.url, bodies=bodies, order=order, num_clients=arguments.clients, seconds=arguments.seconds)

    engine_core, spent = core(llm), EngineTime()
    engine_core._executor.submit = spent.watch("model", engine_core._executor.submit)
    engine_core._sample = spent.watch("sampler", engine_core._sample)
    begun = seconds_by_thread()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        outcome = pool.apply(ask_all, (load,))
    by_thread = seconds_by_thread() - begun
    total = by_thread.total()

    failed = sum(text is None for text in outcome.texts)
    mixed_up = sum(text not in (None, alone[index]) for text, index in zip(outcome.texts, order, strict=False))
    num_tokens = outcome.num_tokens
    by_thread["engine"] -= sum(spent.seconds.values())
    beside = by_thread.total()
    print(
        f"{len(outcome.texts)} of {len(order)} streams of up to {arguments.tokens} tokens, half under grammars, "
        f"{arguments.clients} at a time, {NUM_ADAPTERS} adapters, "
        f"{'tiny model' if arguments.tiny else 'SmolLM2-135M in float32'}, one thread of {platform.machine()}: "
        f"{failed} failed, {mixed_up} mixed up; {outcome.seconds:.1f} s, {num_tokens / outcome.seconds:.0f} tokens/s"
    )
    print(
        f"processor time of the server {total:.1f} s: model {spent.seconds['model'] / total:.1%}, sampler "
        f"{spent.seconds['sampler'] / total:.1%}, the rest {beside / total:.1%} "
        f"({1e6 * beside / num_tokens:.0f} µs a token; allowed {TARGET_SHARE:.0%}): "
        + ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in by_thread.most_common() if seconds > 0)
    )
    is_too_much = beside > TARGET_SHARE * total and not arguments.tiny
    return 1 if failed or mixed_up or is_too_much or len(outcome.texts) < len(order) else 0


def seconds_by_thread() -> Counter[str]:
    """Processor seconds so far of this process, by what its threads are for."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: Counter[str] = Counter()
    for thread in psutil.Process().threads():
        spent[PARTS.get(names.get(thread.id, "").rstrip("0123456789_"), "others")] += (
            thread.user_time + thread.system_time
        )
    return spent


def ask_all(load: Load) -> Outcome:
    return asyncio.run(_ask_all(load))


async def _ask_all(load: Load) -> Outcome:
    texts: list[str | None] = []
    num_tokens = 0
    begun = time.perf_counter()
    left = itertools.takewhile(lambda _: time.perf_counter() - begun < load.seconds, load.order)

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        for index in left:
            number = len(texts)
            texts.append(None)
            texts[number], count = await _ask(http, load.bodies[index])
            num_tokens += count

    async with httpx.AsyncClient(base_url=load.url, timeout=None, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(load.num_clients)))
    return Outcome(texts=texts, num_tokens=num_tokens, seconds=time.perf_counter() - begun)


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str | None, int]:
    """The answer's text put together, None if it is refused, fails or does not end as it should; and its tokens."""
    text, count, is_done = "", 0, False
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.is_error:
                return None, 0
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                is_done = data == "[DONE]"
                if data != line and not is_done:
                    chunk = json.loads(data)
                    text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    count += (chunk.get("usage") or {"completion_tokens": 0})["completion_tokens"]
                if is_done:
                    break
    except httpx.HTTPError:
        return None, 0
    return (text if is_done else None), count


if __name__ == "__main__":
    sys.exit(main())
