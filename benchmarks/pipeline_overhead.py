"""What does it cost to divide a model among two workers?

SmolLM2-135M in two stages, a worker of one thread each, against one worker of two threads: the same cores, and the same
Ray. 16 requests at once go to one and to the other in turn, so that a slow minute of the machine hits both; their
tokens have to be the same. The first round of each is not counted.

    python benchmarks/pipeline_overhead.py [--rounds 5] [--in-flight 2] [--dtype auto] [--requests 16]

`--dtype auto` computes with the file's 4-bit codes, any other with dequantised weights. Writes its section of
RESULTS.md. Exits with 1 when the stages are slower than 0.7 times the one worker, or a token differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from results import conditions, write_section

from graftlm import LLM, SamplingParams
from graftlm.demo import demo_model

PROMPT_LEN, OUTPUT_LEN = 32, 32
ALLOWED_RATIO = 0.7
NUM_CPUS = 8


@dataclass(frozen=True, kw_only=True)
class Round:
    """tokens_per_second: of the answers, their prompts' time included. cpu_seconds: of this process, which schedules,
    samples and passes on, not of the workers."""

    token_ids: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    cpu_seconds: float


def open_llm(dtype: str, **workers: Any) -> LLM:
    quantization = None if dtype == "auto" else "none"
    return LLM(demo_model(), dtype=dtype, quantization=quantization, kv_cache_bytes=1 << 28, **workers)


def run(llm: LLM, prompts: list[list[int]]) -> Round:
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    return Round(
        token_ids=tuple(output.outputs[0].token_ids for output in outputs),
        tokens_per_second=len(prompts) * OUTPUT_LEN / seconds,
        cpu_seconds=cpu_seconds,
    )


def utilisation(llm: LLM) -> str:
    """Of each stage, how long it computed and waited."""
    works = [worker.work for worker in llm.workers if worker.work is not None]
    return ", ".join(f"{work.compute_seconds:.1f} s computing and {work.idle_seconds:.1f} s waiting" for work in works)


def report(one: list[Round], two: list[Round], stages: str, arguments: argparse.Namespace) -> tuple[str, float]:
    """The section, and how many times as fast the two are."""
    speeds = [statistics.median(each.tokens_per_second for each in rounds) for rounds in (one, two)]
    cpu = [statistics.median(each.cpu_seconds for each in rounds) for rounds in (one, two)]
    num_tokens = arguments.requests * OUTPUT_LEN
    ratios = [other.tokens_per_second / each.tokens_per_second for each, other in zip(one, two, strict=True)]
    ratio = statistics.median(ratios)
    lines = [
        f"SmolLM2-135M, dtype {arguments.dtype}, {arguments.requests} requests of {PROMPT_LEN} + {OUTPUT_LEN} tokens, "
        f"{arguments.in_flight} steps in flight, medians of {len(one)} rounds in turn. {conditions()}.",
        "",
        "| | tokens per second | coordinator's CPU per token |",
        "| --- | --- | --- |",
        f"| one worker of two threads | {speeds[0]:.1f} | {1e3 * cpu[0] / num_tokens:.2f} ms |",
        f"| two workers of one thread | {speeds[1]:.1f} | {1e3 * cpu[1] / num_tokens:.2f} ms |",
        "",
        f"* Two over one, median of the rounds: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"* The stages in all rounds: {stages}",
    ]
    return "\n".join(lines), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    arguments = parser.parse_args()
    # Before Ray is imported, which reads it then: off, it listens on 127.0.0.1 only.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    # One for both engines; what an idle worker reserves counts too.
    ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    one = open_llm(arguments.dtype, workers=1, worker_cpus=2)
    two = open_llm(arguments.dtype, workers=2, worker_cpus=1, steps_in_flight=arguments.in_flight)
    generator = torch.Generator().manual_seed(0)
    rounds: list[tuple[Round, Round]] = []
    for _ in range(arguments.rounds + 1):
        prompts = torch.randint(0, 40_000, (arguments.requests, PROMPT_LEN), generator=generator).tolist()
        rounds.append((run(one, prompts), run(two, prompts)))
    firsts, seconds = zip(*rounds[1:], strict=True)
    body, ratio = report(list(firsts), list(seconds), utilisation(two), arguments)
    ray.shutdown()
    print(body)
    write_section("Two stages and one (`python benchmarks/pipeline_overhead.py`)", body)
    is_same = all(each.token_ids == other.token_ids for each, other in rounds)
    if not is_same:
        print("tokens differ")
    sys.exit(0 if is_same and ratio >= ALLOWED_RATIO else 1)


if __name__ == "__main__":
    main()
