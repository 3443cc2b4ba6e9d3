"""With `deterministic=True` a request's logits are the same bits whatever happens around it (R040, R090, R091)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.calibration import quantize_calibrated
from graftlm.config import DType
from graftlm.distributed.in_process import InProcessPool
from graftlm.distributed.start import serve_on_workers
from graftlm.engine.engine import Engine
from graftlm.engine.executor import Executor, StepInFlight, WorkerInfo
from graftlm.engine.scheduler import Replay, ScheduledSequence
from graftlm.engine.served_model import ServedModel, serve_here
from graftlm.engine.stage_range import StageRange
from graftlm.kernels.cpu.library import LEVEL_VARIABLE, best_library
from tests.parity import method_rig
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.quantized_bases import FORMATS
from tests.tiny import ALL_PROJECTIONS, make_adapter, make_llama, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # Prefix tuning hands its cache to transformers under the old name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

# Rows of logits by their position in the sequence.
Rows = dict[int, Tensor]

# A length, and whose: an adapter's, a weighted sum's or the base's.
Requests = Sequence[tuple[int, str | None]]

# Within one key tile of 128 keys, and beyond; all prompts begin alike.
REQUESTS: Requests = ((1, None), (17, "lora"), (33, "dora"), (6, "head"), (140, "lora"), (33, "head"), (35, None))
FEW_REQUESTS: Requests = ((35, None), (17, "lora"), (33, "dora"), (36, "head"))
METHODS: Mapping[str, tuple[type[peft.PeftConfig], Mapping[str, Any]]] = {
    "oft": (peft.OFTConfig, {"oft_block_size": 8, "target_modules": ALL_PROJECTIONS}),
    "vera": (peft.VeraConfig, {"r": 6, "target_modules": ["q_proj", "o_proj"]}),
    "ia3": (peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "road": (peft.RoadConfig, {"group_size": 8}),
    "prefix": (peft.PrefixTuningConfig, {"num_virtual_tokens": 5}),
    "prompt": (peft.PromptTuningConfig, {"num_virtual_tokens": 17}),
}
METHOD_REQUESTS: Requests = (
    *((36, name) for name in METHODS),
    # Up to its invocation, in the second block, an activated LoRA shares the base's.
    (40, "activated"),
    (40, None),
    (34, "small:0.7+large:-0.4"),
    (34, "large"),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """family: of `FAMILY_CASES`. engine: options. settings: of the model's config, beside the case's.

    stored: the format the base is in, of `FORMATS`. level: of the kernels; None for the fastest there is.
    """

    family: str
    dtype: DType
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    requests: Requests = REQUESTS
    stored: str | None = None
    level: str | None = None


# Rows are whole blocks, and the head has whole words.
BLOCKS = {"intermediate_size": 128, "vocab_size": 260}


def stored(name: str, **more: Any) -> Setup:
    return Setup(family="llama", dtype="float32", settings=BLOCKS, requests=FEW_REQUESTS, stored=name, **more)


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
    "no-kernels": Setup(family="llama", dtype="bfloat16", settings=ODD, requests=FEW_REQUESTS, level="none"),
    "portable": Setup(family="gemma2", dtype="bfloat16", requests=FEW_REQUESTS, level="portable"),
    "methods-float32": Setup(family="llama", dtype="float32", requests=METHOD_REQUESTS),
    "methods-bfloat16": Setup(family="llama", dtype="bfloat16", requests=METHOD_REQUESTS),
}
STORED = {
    "portable-w8a8": stored("w8a8", level="portable"),
    **{
        name: stored(name) for name in ("w8a8", "gptq", "awq", "fp8", "compressed_tensors", "q4_0", "q8_0", "int8_head")
    },
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with adapters, and each request's logits when it is computed alone, in one go, by one thread."""

    config: EngineConfig
    requests: Requests
    alone: list[Rows]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything that may not matter. engine: options. order: shuffles the requests. prompt_rows: whether logits of
    prompts are wanted too."""

    engine: Mapping[str, Any]
    order: random.Random
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
    order=st.randoms(use_true_random=False),
    prompt_rows=st.booleans(),
)


class RecordingExecutor:
    """Passes on what another executor computes, and keeps it by request and position.

    num_repeated: rows that were computed more than once.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.rows: dict[str, Rows] = {}
        self.num_repeated = 0

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._executor.workers

    @property
    def depth(self) -> int:
        return self._executor.depth

    def submit(self, sequences: Sequence[ScheduledSequence], replays: Sequence[Replay] = ()) -> RecordedStep:
        return RecordedStep(self, sequences, self._executor.submit(sequences, replays))

    def record(self, sequences: Sequence[ScheduledSequence], logits: Tensor) -> None:
        wanted = iter(logits.clone())
        for sequence in sequences:
            rows = self.rows.setdefault(sequence.request_id, {})
            for position in range(sequence.stop - sequence.num_logits, sequence.stop):
                row = next(wanted)
                # A preempted request comes by again.
                self.num_repeated += position in rows
                assert is_same(rows.setdefault(position, row), row)

    def recover(self) -> StageRange | None:
        return self._executor.recover()

    def close(self) -> None:
        self._executor.close()


@dataclass(frozen=True)
class RecordedStep:
    executor: RecordingExecutor
    sequences: Sequence[ScheduledSequence]
    step: StepInFlight

    def logits(self) -> Tensor:
        logits = self.step.logits()
        self.executor.record(self.sequences, logits)
        return logits


def is_same(left: Tensor, right: Tensor) -> bool:
    """Whether two rows are, apart from tokens that only others in a batch have."""
    if len(left) > len(right):
        left, right = right, left
    return torch.equal(left, right[: len(left)]) and bool(right[len(left) :].isneginf().all())


Load = Callable[..., ServedModel]


def serve_on_two_workers(config: EngineConfig, checkpoint: Any, residency: Any) -> ServedModel:
    return serve_on_workers(config, checkpoint, residency, InProcessPool())


@contextmanager
def recording(config: EngineConfig, load: Load = serve_here) -> Iterator[tuple[LLM, RecordingExecutor]]:
    executors = []

    def load_and_record(*arguments: Any) -> ServedModel:
        served = load(*arguments)
        executors.append(RecordingExecutor(served.executor))
        return replace(served, executor=executors[0])

    llm = LLM.over(Engine(config, load=load_and_record))
    yield llm, executors[0]
    llm.shutdown()


@contextmanager
def kernels_of(level: str | None) -> Iterator[None]:
    """In this process, until it ends."""
    with pytest.MonkeyPatch.context() as patch:
        if level is not None:
            patch.setenv(LEVEL_VARIABLE, level)
        best_library.cache_clear()
        yield
    best_library.cache_clear()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def beginning(length: int) -> list[int]:
    generator = random.Random(0)
    return [generator.randrange(256) for _ in range(length)]


def prompt(index: int, length: int) -> dict[str, list[int]]:
    """They begin alike, up to two blocks, and go on differently."""
    common, rest = min(length - 1, 32), random.Random(index + 1)
    return {"prompt_token_ids": beginning(common) + [rest.randrange(256) for _ in range(length - common)]}


def compute(
    llm: LLM,
    executor: RecordingExecutor,
    requests: Requests,
    order: Sequence[int],
    *,
    prompt_rows: bool,
    max_tokens: int = 2,
) -> dict[int, Rows]:
    """The requests' rows, all of them computed together."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, prompt_logprobs=0 if prompt_rows else None
    )
    prompts = [prompt(index, requests[index][0]) for index in order]
    outputs = llm.generate(prompts, params, adapter=[requests[index][1] for index in order])
    return {index: executor.rows[f"{output.request_id}-0"] for index, output in zip(order, outputs, strict=True)}


def make_base(setup: Setup, config: Any, folder: Path) -> tuple[Path, Path]:
    """What is served, and what PEFT makes adapters for."""
    plain = make_model(folder / "base", config)
    if setup.stored is None:
        return plain, plain
    if setup.stored == "w8a8":
        text = folder / "text.txt"
        text.write_text("".join(map(chr, random.Random(0).choices(range(33, 127), k=2000))))
        quantize_calibrated(plain, folder / "w8a8", text)
        return folder / "w8a8", plain
    return FORMATS[setup.stored](plain, folder).quantized, plain


def make_adapters(setup: Setup, case: FamilyCase, base: Path, folder: Path) -> dict[str, Path]:
    kinds = case.adapters()
    adapters = {
        "lora": make_adapter(base, folder / "lora", r=5, **kinds["lora"]),
        "dora": make_adapter(base, folder / "dora", r=3, seed=2, **kinds["dora"]),
        "head": make_adapter(base, folder / "head", r=1, seed=3, **kinds["saved_head"]),
    }
    if setup.requests is METHOD_REQUESTS:
        invocation = beginning(20)[18:]
        adapters["activated"] = make_adapter(base, folder / "activated", alora_invocation_tokens=invocation)
        adapters["small"] = make_adapter(base, folder / "small", r=2, seed=4)
        adapters["large"] = make_adapter(base, folder / "large", r=9, seed=5, target_modules=ALL_PROJECTIONS)
        for name, (method, config) in METHODS.items():
            adapters[name] = method_rig.make_adapter(base, folder / name, method(task_type="CAUSAL_LM", **config))
    return adapters


def serve(setup: Setup, folder: Path) -> Served:
    case = FAMILY_CASES[setup.family]
    case = replace(case, settings={**case.settings, **setup.settings})
    model, plain = make_base(setup, case.config(), folder)
    config = EngineConfig(
        model=model,
        adapters=make_adapters(setup, case, plain, folder),
        dtype=setup.dtype,
        deterministic=True,
        kv_cache_bytes=1 << 23,
        **setup.engine,
    )
    requests = setup.requests
    with threads(1), recording(replace(config, prefix_cache=False)) as (llm, executor):
        alone = [compute(llm, executor, requests, [index], prompt_rows=True)[index] for index in range(len(requests))]
    return Served(config=config, requests=requests, alone=alone)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    setup = {**SETUPS, **STORED}[request.param]
    with kernels_of(setup.level):
        yield serve(setup, tmp_path_factory.mktemp("deterministic"))


def assert_alone(served: Served, together: Mapping[int, Rows]) -> None:
    """Each row is what its request gets alone."""
    for index, rows in together.items():
        for position, row in rows.items():
            assert is_same(row, served.alone[index][position]), (served.requests[index], position)


def over(*names: str) -> pytest.MarkDecorator:
    """Run a test on what is served with these setups."""
    return pytest.mark.parametrize("served", names, indirect=True, scope="module")


@over(*SETUPS)
@settings(deadline=None, derandomize=True, database=None, max_examples=2)
@given(surroundings=SURROUNDINGS)
def test_r040_r091_logits_are_the_same_bits_alone_and_anywhere(served: Served, surroundings: Surroundings) -> None:
    order = list(range(len(served.requests)))
    surroundings.order.shuffle(order)
    with recording(replace(served.config, **surroundings.engine)) as (llm, executor):
        # The second time the beginnings of all prompts are in the prefix cache.
        for prompt_rows in (surroundings.prompt_rows, False):
            assert_alone(served, compute(llm, executor, served.requests, order, prompt_rows=prompt_rows))


@over(*STORED)
def test_every_weight_format_gives_the_same_bits(served: Served) -> None:
    config = replace(served.config, max_num_batched_tokens=40, prefill_chunk_tokens=13)
    with recording(config) as (llm, executor):
        for order in ([2, 0, 3, 1], [0, 1, 2, 3]):
            assert_alone(served, compute(llm, executor, served.requests, order, prompt_rows=False))


@over("llama-float32", "llama-bfloat16", "no-kernels", "w8a8")
def test_two_threads_give_the_same_bits(served: Served) -> None:
    with threads(2), recording(served.config) as (llm, executor):
        assert_alone(served, compute(llm, executor, served.requests, [3, 0], prompt_rows=True))


@over("methods-float32", "q4_0")
def test_workers_give_the_same_bits(served: Served) -> None:
    config = replace(served.config, workers=2)
    with recording(config, serve_on_two_workers) as (llm, executor):
        order = range(len(served.requests))
        assert_alone(served, compute(llm, executor, served.requests, order, prompt_rows=False))


@pytest.mark.parametrize("level", [None, "none"])
def test_preempted_requests_get_the_same_bits(level: str | None, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "lora")
    requests: Requests = [(30, "lora"), (29, None), (28, "lora"), (27, None)]
    config = EngineConfig(model=base, adapters={"lora": adapter}, dtype="bfloat16", deterministic=True)
    # Twelve blocks: each request begins with two and ends with five.
    pools = {"alone": 1 << 22, "together": 12 * 4096}
    rows = {}
    with kernels_of(level):
        for name, pool in pools.items():
            with recording(replace(config, kv_cache_bytes=pool, prefix_cache=False)) as (llm, executor):
                orders = [[0, 1, 2, 3]] if name == "together" else [[index] for index in range(4)]
                rows[name] = [
                    compute(llm, executor, requests, order, prompt_rows=True, max_tokens=40) for order in orders
                ]
                assert (executor.num_repeated > 0) == (name == "together")
    alone = {index: each for one in rows["alone"] for index, each in one.items()}
    assert_alone(
        Served(config=config, requests=requests, alone=[alone[index] for index in range(4)]), rows["together"][0]
    )
