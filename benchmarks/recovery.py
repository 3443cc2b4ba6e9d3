"""What does it cost when workers die?

SmolLM2-135M, multiplied by its file's 4-bit codes in bfloat16, divided among workers of one thread each; 200 requests
for the base and the demo's adapters, 16 at a time. Every 10 s one worker is killed (SIGKILL, each stage in turn; later
if no spare has started yet). Once with the activation journal, by which only the replacement computes again, and once
without it, so that all stages compute all tokens again. Every answer is compared with one process's; `deterministic`
keeps what runs beside it out of its bits.

    python benchmarks/recovery.py [--requests 200] [--concurrency 16] [--every 10] [--workers 2] [--prompt-len 96]

Pauses after a kill: the longest time in which no answer got a token, and for each answer under way the longer of its
next two waits, since a step that had left the workers still ends. Writes its section of RESULTS.md. Exits with 1 if an
answer is lost or wrong, or nobody was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from results import conditions, write_section

from graftlm import LLM, AsyncLLM, SamplingParams
from graftlm.demo import demo_adapters, demo_model
from graftlm.engine.executor import WorkerInfo
from graftlm.errors import GraftError

OUTPUT_LEN = 32
PARAMS = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
MODES = {"the activation journal": True, "tokens": False}


@dataclass(frozen=True, kw_only=True)
class Question:
    """adapter: None for the base."""

    token_ids: tuple[int, ...]
    adapter: str | None


@dataclass(kw_only=True)
class Run:
    """answers: in the order of the questions; None for those that were lost. silences: of all answers together after
    each kill, pauses: of each that was under way, in seconds. computed, replayed: tokens, of all stages together,
    workers that were killed included."""

    answers: list[tuple[int, ...] | None]
    silences: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    computed: int = 0
    replayed: int = 0
    seconds: float = 0.0


class Traffic:
    """The questions, so many at a time, and the times at which answers under way got their tokens."""

    def __init__(self, engine: AsyncLLM, questions: Sequence[Question], concurrency: int) -> None:
        self._engine = engine
        self._questions = questions
        self._gate = asyncio.Semaphore(concurrency)
        self._under_way: dict[int, list[float]] = {}

    async def run(self) -> list[tuple[int, ...] | None]:
        return await asyncio.gather(*(self._ask(index) for index in range(len(self._questions))))

    async def waits_from(self, killed: float) -> list[list[float]]:
        """Of each answer that is under way: its next two waits for a token, or its only one, in seconds from a moment
        that has just been; and of all together, first."""
        watched = dict(self._under_way)
        while any(len(_after(killed, times)) < 2 for index, times in watched.items() if index in self._under_way):
            await asyncio.sleep(0.005)
        of_each = [moments[:2] for times in watched.values() if (moments := _after(killed, times))]
        of_all = sorted(moment for moments in of_each for moment in moments)
        return [_waits(killed, of_all), *(_waits(killed, moments) for moments in of_each)] if of_each else []

    async def _ask(self, index: int) -> tuple[int, ...] | None:
        question, token_ids = self._questions[index], list[int]()
        async with self._gate:
            prompt = {"prompt_token_ids": list(question.token_ids)}
            try:
                async for delta in self._engine.stream(prompt, PARAMS, adapter=question.adapter):
                    token_ids.extend(delta.outputs[0].token_ids)
                    self._under_way.setdefault(index, []).append(time.perf_counter())
            except GraftError as error:
                print(f"request {index} is lost: {error}", file=sys.stderr)
                return None
            finally:
                self._under_way.pop(index, None)
        return tuple(token_ids)


class Killer:
    """Kills a worker every so often, and counts what the workers have computed."""

    def __init__(self, engine: AsyncLLM, traffic: Traffic, run: Run, every: float) -> None:
        self._engine = engine
        self._traffic = traffic
        self._run = run
        self._every = every
        self._of_dead: Counter[str] = Counter()

    async def kill_on(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._every)
            while not any(worker.state == "spare" for worker in self._engine.workers):
                await asyncio.sleep(0.1)
            stages = _stages(self._engine)
            victim = stages[number % len(stages)]
            self._count(victim)
            os.kill(victim.pid, signal.SIGKILL)
            waits = await self._traffic.waits_from(time.perf_counter())
            self._run.silences += [max(of_all) for of_all in waits[:1]]
            self._run.pauses += [max(of_each) for of_each in waits[1:]]
            number += 1

    def count_all(self) -> None:
        for worker in _stages(self._engine):
            self._count(worker)

    def _count(self, worker: WorkerInfo) -> None:
        assert worker.work is not None
        self._run.computed += worker.work.num_tokens
        self._run.replayed += worker.work.num_replayed_tokens


def _after(moment: float, times: Sequence[float]) -> list[float]:
    return [at for at in times if at > moment]


def _waits(begun: float, moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([begun, *moments])]


def _stages(engine: AsyncLLM) -> list[WorkerInfo]:
    return [worker for worker in engine.workers if worker.work is not None]


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "adapters": demo_adapters(),
        "dtype": "bfloat16",
        "deterministic": True,
        "kv_cache_bytes": 1 << 28,
        "max_num_seqs": arguments.concurrency,
    }


def make_questions(arguments: argparse.Namespace) -> list[Question]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 40_000, (arguments.requests, arguments.prompt_len), generator=generator).tolist()
    names = [None, *demo_adapters()]
    return [
        Question(token_ids=tuple(prompt), adapter=names[index % len(names)]) for index, prompt in enumerate(prompts)
    ]


def expect(arguments: argparse.Namespace, questions: Sequence[Question]) -> list[tuple[int, ...]]:
    llm = LLM(demo_model(), **options(arguments))
    prompts = [{"prompt_token_ids": list(question.token_ids)} for question in questions]
    outputs = llm.generate(prompts, PARAMS, adapter=[question.adapter for question in questions])
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


async def disturb(arguments: argparse.Namespace, questions: Sequence[Question], *, journal: bool) -> Run:
    engine = AsyncLLM(
        demo_model(), workers=arguments.workers, worker_cpus=1, activation_journal=journal, **options(arguments)
    )
    run = Run(answers=[])
    traffic = Traffic(engine, questions, arguments.concurrency)
    killer = Killer(engine, traffic, run, arguments.every)
    killing = asyncio.create_task(killer.kill_on())
    begun = time.perf_counter()
    run.answers = await traffic.run()
    run.seconds = time.perf_counter() - begun
    killing.cancel()
    killer.count_all()
    await engine.shutdown()
    return run


def report(
    arguments: argparse.Namespace, runs: dict[str, Run], expected: Sequence[tuple[int, ...]], loads: Sequence[str]
) -> tuple[str, bool]:
    """The section, and whether all went well."""
    needed = arguments.workers * arguments.requests * (arguments.prompt_len + OUTPUT_LEN - 1)
    rows, is_well = [], True
    for name, run in runs.items():
        lost = run.answers.count(None)
        wrong = sum(ours not in (None, theirs) for ours, theirs in zip(run.answers, expected, strict=True))
        is_well &= not lost and not wrong and bool(run.pauses)
        silences, pauses = (
            f"{statistics.median(times):.2f} / {max(times):.2f}" if times else ""
            for times in (run.silences, run.pauses)
        )
        beyond = f"{100 * (run.computed - needed) / needed:.0f}% ({run.replayed})"
        cells = (name, len(run.silences), lost, wrong, silences, pauses, beyond, f"{run.seconds:.0f}")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    lines = [
        f"SmolLM2-135M, bfloat16, in {arguments.workers} workers of one thread, {arguments.requests} requests of "
        f"{arguments.prompt_len} + {OUTPUT_LEN} tokens for the base and {len(demo_adapters())} adapters, "
        f"{arguments.concurrency} at a time, a worker killed every {arguments.every:g} s. {conditions()}; load average "
        f"of the machine before and after each run: {', '.join(loads)}.",
        "",
        "| computed again from | kills | answers lost | wrong | s without any token, median / max | s of each answer | "
        "tokens computed beyond need (replayed) | s in all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines), is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    questions = make_questions(arguments)
    expected = expect(arguments, questions)
    runs, loads = {}, [f"{os.getloadavg()[0]:.1f}"]
    for name, journal in MODES.items():
        runs[name] = asyncio.run(disturb(arguments, questions, journal=journal))
        loads.append(f"{os.getloadavg()[0]:.1f}")
        print(f"{name}: {len(runs[name].silences)} kills, {runs[name].seconds:.0f} s", flush=True)
    body, is_well = report(arguments, runs, expected, loads)
    print(body)
    write_section("Workers that are killed (`python benchmarks/recovery.py`)", body)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
