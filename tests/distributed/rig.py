"""What the distributed tests share: traffic of all adapters at once, and pipelines over workers in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftlm import LLM, EngineConfig, RequestOutput, SamplingParams
from graftlm.distributed.in_process import Fault, InProcessPool, Machine
from graftlm.distributed.start import serve_on_workers
from graftlm.engine.engine import Engine
from graftlm.engine.outputs import RequestFailure
from tests.parity.oracle import assert_close, prompt_of

NUM_LAYERS = 4
# Several blocks in several chunks, less than a block, one token.
LENGTHS = (40, 7, 1)
# Small enough for prompts to take several steps, and for decodes and prompts to meet in one.
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 24}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An `LLM` over workers in this process."""

    llm: LLM
    engine: Engine
    pool: InProcessPool


def open_pipeline(
    base: Path,
    adapters: Mapping[str, Path],
    faults: Sequence[Fault] = (),
    machines: Sequence[Machine] = (Machine(node="here"),),
    **options: Any,
) -> Pipeline:
    pool = InProcessPool(faults, machines)
    config = EngineConfig(model=base, adapters=adapters, **{**OPTIONS, "workers": 2, **options})
    engine = Engine(
        config, load=lambda config, checkpoint, residency: serve_on_workers(config, checkpoint, residency, pool)
    )
    return Pipeline(llm=LLM.over(engine), engine=engine, pool=pool)


def requests(names: Sequence[str]) -> tuple[list[dict[str, list[int]]], list[str | None]]:
    """Prompts of every length for the base and for each adapter, all different, and whose they are."""
    rows = [(length, name) for length in LENGTHS for name in (None, *names)]
    prompts = [{"prompt_token_ids": list(prompt_of(length, seed))} for seed, (length, _) in enumerate(rows)]
    return prompts, [name for _, name in rows]


def answers(llm: LLM, names: Sequence[str], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """All requests in one running batch."""
    prompts, adapters = requests(names)
    return llm.generate(prompts, params, adapter=adapters)


def run(
    pipeline: Pipeline, names: Sequence[str], disturb: Callable[[int, list[str]], None] = lambda count, job_ids: None
) -> list[tuple[int, ...] | Exception]:
    """What each of the requests comes to, all of them begun at once. disturb: told after each step how many there
    were, and of the jobs."""
    engine = pipeline.engine
    jobs = [engine.make_job(prompt, GREEDY, name) for prompt, name in zip(*requests(names), strict=True)]
    results: dict[str, list[int]] = {job.job_id: [] for job in jobs}
    errors: dict[str, Exception] = {}
    for job in jobs:
        engine.core.add(job)
    count = 0
    while engine.core.has_work:
        for item in engine.core.step():
            if isinstance(item, RequestFailure):
                errors[item.request_id] = item.error
            else:
                results[item.request_id].extend(item.outputs[0].token_ids)
        count += 1
        disturb(count, list(results))
    return [errors.get(job_id, tuple(ids)) for job_id, ids in results.items()]


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_same_logits(ours: LLM, expected: LLM, names: Sequence[str]) -> None:
    """Every adapter's logits are those of the other engine, and not the base's."""
    ids = prompt_of(30, 99)
    base = expected.logits(ids)
    assert_close(ours.logits(ids), base, 1e-4)
    for name in names:
        own = expected.logits(ids, adapter=name)
        assert_close(ours.logits(ids, adapter=name), own, 1e-4)
        known = min(own.shape[1], base.shape[1])
        assert (own[:, :known] - base[:, :known]).abs().max() > max(1e-2, 0.5 * float(torch.std(base))), name


def assert_nothing_is_held(pipeline: Pipeline, num_free_blocks: int) -> None:
    assert pipeline.llm.num_free_blocks == num_free_blocks
    registry = pipeline.engine.registry
    # One for the name, and none for a request.
    assert {registry.num_users(adapter.digest) for adapter in pipeline.llm.adapters.values()} <= {1}
