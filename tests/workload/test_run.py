"""A workload is run as it says, and every token of it is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from graftlm import LLM, SamplingParams
from graftlm.config import EngineConfig
from graftlm.engine.engine import Engine
from graftlm.errors import ConfigurationError, ContextLengthExceeded, ModelNotFound
from graftlm.workload import Workload, run_workload
from tests.tiny import make_adapter

REQUESTS, PROMPT, OUTPUT = 5, 20, 6


@pytest.fixture(scope="module")
def adapter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(llama, tmp_path_factory.mktemp("workload") / "red")


@pytest.fixture(scope="module")
def engine(llama: Path, adapter: Path) -> Iterator[Engine]:
    # The steps are small enough to cut prompts in two and to mix them with decodes.
    engine = Engine(
        EngineConfig(
            model=llama,
            adapters={"red": adapter},
            kv_cache_bytes=4 << 20,
            max_num_batched_tokens=32,
            max_num_seqs=3,
            prefix_cache=False,
        )
    )
    yield engine
    engine.close()


def workload(**changes: object) -> Workload:
    settings = {"num_requests": REQUESTS, "prompt_tokens": PROMPT, "output_tokens": OUTPUT, "adapters": ("red",)}
    return Workload(**{**settings, **changes})  # type: ignore[arg-type]


def test_every_token_is_in_one_step(engine: Engine) -> None:
    run = run_workload(engine, workload())
    assert sum(step.prompt_rows for step in run.steps) == REQUESTS * PROMPT
    # The last token of an answer is never computed.
    assert sum(step.decode_rows for step in run.steps) == REQUESTS * (OUTPUT - 1)
    assert sum(len(step.contexts) for step in run.steps) == REQUESTS * OUTPUT
    assert max(context for step in run.steps for context in step.contexts) == PROMPT + OUTPUT - 1
    assert max(step.prompt_rows + step.decode_rows for step in run.steps) == 32
    assert any(step.prompt_rows and step.decode_rows for step in run.steps)


def test_times_of_tokens_ascend_and_steps_fill_the_run(engine: Engine) -> None:
    run = run_workload(engine, workload())
    assert [len(times) for times in run.token_times] == [OUTPUT] * REQUESTS
    assert all(0 < earlier < later for times in run.token_times for earlier, later in pairwise(times))
    assert sum(step.seconds for step in run.steps) == pytest.approx(run.seconds)


def test_answers_are_those_of_generate_with_adapters_in_turn(engine: Engine, llama: Path, adapter: Path) -> None:
    asked = workload(adapters=("red",), num_requests=2)
    plain = workload(adapters=(), num_requests=2)
    llm = LLM(llama, adapters={"red": adapter}, kv_cache_bytes=4 << 20)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts(len(engine.tokenizer))]
    expected = {
        name: tuple(output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=name))
        for name in ("red", None)
    }
    llm.shutdown()
    assert run_workload(engine, asked).token_ids == expected["red"] != expected[None]
    assert run_workload(engine, plain).token_ids == expected[None]


def test_adapters_take_turns() -> None:
    asked = workload(adapters=("red", "blue"), num_requests=3)
    assert [asked.adapter_of(index) for index in range(3)] == ["red", "blue", "red"]
    assert workload(adapters=("red", "blue"), num_requests=1).active_adapters == ("red",)
    assert workload(adapters=()).adapter_of(0) is None


def test_the_same_seed_asks_the_same() -> None:
    assert workload().prompts(259) == workload().prompts(259) != workload(seed=1).prompts(259)
    assert {len(prompt) for prompt in workload().prompts(259)} == {PROMPT}


def test_what_cannot_be_asked_is_refused_and_leaves_nothing_behind(engine: Engine) -> None:
    free = engine.core.num_free_blocks
    with pytest.raises(ModelNotFound):
        run_workload(engine, workload(adapters=("red", "green")))
    with pytest.raises(ContextLengthExceeded):
        run_workload(engine, workload(prompt_tokens=600))
    with pytest.raises(ConfigurationError, match="output_tokens must be a positive integer; got: 0"):
        workload(output_tokens=0)
    assert engine.core.num_free_blocks == free
    assert not engine.core.has_work
