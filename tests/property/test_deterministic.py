"""With `deterministic=True` a request's logits are the same bits whatever happens around it (R040, R090, R091)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.config import DType
from graftlm.engine.engine import Engine
from graftlm.engine.executor import Executor, WorkerInfo
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.engine.served_model import serve_here
from tests.parity.family_cases import FAMILY_CASES
from tests.tiny import make_adapter, make_model

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")

# Rows of logits by their position in the sequence.
Rows = dict[int, Tensor]

# Within one key tile of 128 keys, and beyond; all prompts begin alike.
REQUESTS = [(1, None), (17, "lora"), (33, "dora"), (6, "head"), (140, "lora"), (33, "head"), (35, None)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """family: of `FAMILY_CASES`. engine: options. settings: of the model's config, beside the case's."""

    family: str
    dtype: DType
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


# Widths that are no multiples of vectors, of tiles or of the terms of a sum.
ODD = {"hidden_size": 296, "intermediate_size": 331, "head_dim": 38}
SETUPS = {
    "llama-float32": Setup(family="llama", dtype="float32", settings=ODD),
    "llama-bfloat16": Setup(family="llama", dtype="bfloat16", settings=ODD),
    "llama-nf4": Setup(family="llama", dtype="bfloat16", engine={"quantization": "nf4"}),
    "gpt2": Setup(family="gpt2", dtype="bfloat16"),
    "bloom": Setup(family="bloom_odd_heads", dtype="float32"),
    "mixtral-float32": Setup(family="mixtral_window", dtype="float32"),
    "mixtral-bfloat16": Setup(family="mixtral_window", dtype="bfloat16"),
    "gemma2": Setup(family="gemma2", dtype="float32"),
    "gemma3": Setup(family="gemma3_text_capped", dtype="bfloat16"),
    "gemma4": Setup(family="gemma4_moe", dtype="bfloat16"),
    "gpt_oss": Setup(family="gpt_oss", dtype="float32"),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with adapters, and each request's logits when it is computed alone, in one go, by one thread."""

    config: EngineConfig
    alone: list[Rows]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything that may not matter. engine: options. order: of the requests. prompt_rows: whether logits of prompts
    are wanted too."""

    engine: Mapping[str, Any]
    order: Sequence[int]
    prompt_rows: bool


SURROUNDINGS = st.builds(
    Surroundings,
    engine=st.fixed_dictionaries(
        {
            "max_num_seqs": st.sampled_from([2, 5, 64]),
            "max_num_batched_tokens": st.sampled_from([40, 131, 1024]),
            "prefill_chunk_tokens": st.sampled_from([None, 13, 64]),
            # Room for the longest request and little else, or for all.
            "kv_cache_bytes": st.sampled_from([1 << 19, 1 << 23]),
        }
    ),
    order=st.permutations(range(len(REQUESTS))),
    prompt_rows=st.booleans(),
)


class RecordingExecutor:
    """Passes on what another executor computes, and keeps it by request and position."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.rows: dict[str, Rows] = {}

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._executor.workers

    def execute(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        logits = self._executor.execute(sequences)
        wanted = iter(logits.clone())
        for sequence in sequences:
            rows = self.rows.setdefault(sequence.request_id, {})
            for position in range(sequence.stop - sequence.num_logits, sequence.stop):
                row = next(wanted)
                # A preempted request comes by again.
                assert is_same(rows.setdefault(position, row), row)
        return logits

    def recover(self) -> None:
        self._executor.recover()

    def close(self) -> None:
        self._executor.close()


def is_same(left: Tensor, right: Tensor) -> bool:
    """Whether two rows are, apart from tokens that only others in a batch have."""
    if len(left) > len(right):
        left, right = right, left
    return torch.equal(left, right[: len(left)]) and bool(right[len(left) :].isneginf().all())


@contextmanager
def recording(config: EngineConfig) -> Iterator[tuple[LLM, RecordingExecutor]]:
    executors = []

    def load(*arguments: Any) -> Any:
        served = serve_here(*arguments)
        executors.append(RecordingExecutor(served.executor))
        return replace(served, executor=executors[0])

    llm = LLM.over(Engine(config, load=load))
    yield llm, executors[0]
    llm.shutdown()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prompt(index: int) -> dict[str, list[int]]:
    """They begin alike, up to two blocks, and go on differently."""
    length, _ = REQUESTS[index]
    common = min(length - 1, 32)
    beginning, rest = random.Random(0), random.Random(index + 1)
    tokens = [beginning.randrange(256) for _ in range(common)] + [rest.randrange(256) for _ in range(length - common)]
    return {"prompt_token_ids": tokens}


def compute(llm: LLM, executor: RecordingExecutor, order: Sequence[int], *, prompt_rows: bool) -> dict[int, Rows]:
    """The requests' rows, all of them computed together."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0 if prompt_rows else None)
    outputs = llm.generate([prompt(index) for index in order], params, adapter=[REQUESTS[index][1] for index in order])
    return {index: executor.rows[f"{output.request_id}-0"] for index, output in zip(order, outputs, strict=True)}


def serve(setup: Setup, folder: Path) -> Served:
    case = FAMILY_CASES[setup.family]
    case = replace(case, settings={**case.settings, **setup.settings})
    base = make_model(folder / "base", case.config())
    kinds = case.adapters()
    adapters = {
        "lora": make_adapter(base, folder / "lora", r=5, **kinds["lora"]),
        "dora": make_adapter(base, folder / "dora", r=3, seed=2, **kinds["dora"]),
        "head": make_adapter(base, folder / "head", r=16, seed=3, **kinds["saved_head"]),
    }
    config = EngineConfig(
        model=base,
        adapters=adapters,
        dtype=setup.dtype,
        deterministic=True,
        kv_cache_bytes=1 << 23,
        **setup.engine,
    )
    with threads(1), recording(replace(config, prefix_cache=False)) as (llm, executor):
        alone = [compute(llm, executor, [index], prompt_rows=True)[index] for index in range(len(REQUESTS))]
    return Served(config=config, alone=alone)


@pytest.fixture(scope="module", params=SETUPS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(SETUPS[request.param], tmp_path_factory.mktemp("deterministic"))


@settings(deadline=None, derandomize=True, database=None, max_examples=2)
@given(surroundings=SURROUNDINGS)
def test_r040_r091_logits_are_the_same_bits_alone_and_anywhere(served: Served, surroundings: Surroundings) -> None:
    config = replace(served.config, **surroundings.engine)
    with recording(config) as (llm, executor):
        # The second time the beginnings of all prompts are in the prefix cache.
        for prompt_rows in (surroundings.prompt_rows, False):
            together = compute(llm, executor, surroundings.order, prompt_rows=prompt_rows)
            for index, rows in together.items():
                for position, row in rows.items():
                    assert is_same(row, served.alone[index][position]), (REQUESTS[index], position)


@pytest.mark.parametrize("served", ["llama-float32", "llama-bfloat16"], indirect=True)
def test_two_threads_give_the_same_bits(served: Served) -> None:
    order = [3, 0]
    with threads(2), recording(served.config) as (llm, executor):
        for index, rows in compute(llm, executor, order, prompt_rows=True).items():
            for position, row in rows.items():
                assert is_same(row, served.alone[index][position]), (REQUESTS[index], position)
