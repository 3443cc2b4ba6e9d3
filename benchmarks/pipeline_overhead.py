"""What does it cost to divide a model among two workers?

SmolLM2-135M in two stages, a worker of one thread each, against one worker of two threads: the same cores, and the same
Ray; and two stages once more with one step at a time, which shows what overlapping is worth. 16 requests at once go to
one after the other, so that a slow minute of the machine hits all; their tokens have to be the same. The first round of
each is not counted.

    python benchmarks/pipeline_overhead.py [--rounds 5] [--dtype auto] [--requests 16]

`--dtype auto` computes with the file's 4-bit codes, any other with dequantised weights. Writes its section of
RESULTS.md. Exits with 1 when the stages are slower than 0.7 times the one worker, or a token differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from results import conditions, write_section

from graftlm import LLM, SamplingParams
from graftlm.demo import demo_model

PROMPT_LEN, OUTPUT_LEN = 32, 32
ALLOWED_RATIO = 0.7
NUM_CPUS = 8
ONE = "one worker of two threads"


@dataclass(frozen=True, kw_only=True)
class Round:
    """tokens_per_second: of the answers, their prompts' time included. cpu_seconds: of this process, which schedules,
    samples and passes on. worker_cpu_seconds: of the workers together, which is less at the mercy of a busy machine."""

    token_ids: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    cpu_seconds: float
    worker_cpu_seconds: float


def worker_cpu(llm: LLM) -> float:
    """What its workers have used, in seconds."""
    used = [psutil.Process(worker.pid).cpu_times() for worker in llm.workers if worker.state == "running"]
    return sum(times.user + times.system for times in used)


def open_llm(dtype: str, **workers: Any) -> LLM:
    quantization = None if dtype == "auto" else "none"
    return LLM(demo_model(), dtype=dtype, quantization=quantization, kv_cache_bytes=1 << 28, **workers)


def run(llm: LLM, prompts: list[list[int]]) -> Round:
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    begun_workers, begun_cpu, begun = worker_cpu(llm), time.process_time(), time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    return Round(
        token_ids=tuple(output.outputs[0].token_ids for output in outputs),
        tokens_per_second=len(prompts) * OUTPUT_LEN / seconds,
        cpu_seconds=cpu_seconds,
        worker_cpu_seconds=worker_cpu(llm) - begun_workers,
    )


def utilisation(llm: LLM) -> str:
    """Of each stage, how long it computed and waited."""
    works = [worker.work for worker in llm.workers if worker.work is not None]
    return ", ".join(f"{work.compute_seconds:.1f} s computing and {work.idle_seconds:.1f} s waiting" for work in works)


def report(rounds: Sequence[Mapping[str, Round]], stages: str, requests: int, dtype: str) -> tuple[str, float]:
    """The section, and how many times as fast as one worker two are that overlap."""
    rows = []
    for name in rounds[0]:
        speed = statistics.median(each[name].tokens_per_second for each in rounds)
        ours = statistics.median(each[name].cpu_seconds for each in rounds)
        theirs = statistics.median(each[name].worker_cpu_seconds for each in rounds)
        cpu = " | ".join(f"{1e3 * seconds / (requests * OUTPUT_LEN):.2f} ms" for seconds in (theirs, ours))
        ratios = [each[name].tokens_per_second / each[ONE].tokens_per_second for each in rounds]
        ratio = statistics.median(ratios)
        spread = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(f"| {name} | {speed:.1f} | {spread} | {cpu} |")
    lines = [
        f"SmolLM2-135M, dtype {dtype}, {requests} requests of {PROMPT_LEN} + {OUTPUT_LEN} tokens, medians of "
        f"{len(rounds)} rounds in turn. {conditions()}; load average of the machine {os.getloadavg()[0]:.1f}.",
        "",
        "| | tokens per second | over one worker | workers' CPU per token | coordinator's |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"The two stages that overlap, in all rounds: {stages}.",
    ]
    return "\n".join(lines), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    arguments = parser.parse_args()
    # Before Ray is imported, which reads it then: off, it listens on 127.0.0.1 only.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    # One for all engines; what an idle worker reserves counts too.
    ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    engines = {
        ONE: open_llm(arguments.dtype, workers=1, worker_cpus=2),
        "two of one thread, a step at a time": open_llm(arguments.dtype, workers=2, worker_cpus=1, steps_in_flight=1),
        "two of one thread": open_llm(arguments.dtype, workers=2, worker_cpus=1),
    }
    generator = torch.Generator().manual_seed(0)
    rounds: list[dict[str, Round]] = []
    for _ in range(arguments.rounds + 1):
        prompts = torch.randint(0, 40_000, (arguments.requests, PROMPT_LEN), generator=generator).tolist()
        rounds.append({name: run(llm, prompts) for name, llm in engines.items()})
    stages = utilisation(engines["two of one thread"])
    body, ratio = report(rounds[1:], stages, arguments.requests, arguments.dtype)
    ray.shutdown()
    print(body)
    write_section("Two stages and one (`python benchmarks/pipeline_overhead.py`)", body)
    is_same = all(len({each.token_ids for each in engine.values()}) == 1 for engine in rounds)
    if not is_same:
        print("tokens differ")
    sys.exit(0 if is_same and ratio >= ALLOWED_RATIO else 1)


if __name__ == "__main__":
    main()
