"""What is refused by name before anything runs, after which the engine answers as before (R022, R079 to R087)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.errors import ConfigurationError, ContextLengthExceeded, EngineClosed, InvalidRequest, ModelNotFound
from tests.engine.rig import BLOCK_BYTES, END, greedy, one, prompt, token_ids, watched

CONTEXT = 128


@pytest.fixture(scope="module")
def short(llama: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    """128 positions."""
    engine = LLM(
        llama, name="tiny", adapters={"red": adapters["red"]}, max_model_len=CONTEXT, kv_cache_bytes=64 * BLOCK_BYTES
    )
    yield engine
    engine.shutdown()


@pytest.fixture(autouse=True)
def _alive(short: LLM) -> Iterator[None]:
    """After whatever a test sent, the engine still has its tokens."""
    before = token_ids(one(short, prompt(9), greedy(6)))
    yield
    assert token_ids(one(short, prompt(9), greedy(6))) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 2), ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1),
        ("top_k", 10**6),
        ("presence_penalty", -2), ("presence_penalty", 2), ("frequency_penalty", -2.0), ("frequency_penalty", 2),
        ("n", 128), ("logprobs", 0), ("logprobs", 20), ("prompt_logprobs", 20), ("min_tokens", 16),
        ("logit_bias", {0: -100, 258: 100}), ("logit_bias", {}), ("stop", ["x"] * 16), ("stop", []), ("stop", ()),
        ("stop_token_ids", []), ("stop_token_ids", (0, 258)), ("seed", None), ("max_tokens", 0), ("max_tokens", None),
    ],
)  # fmt: skip
def test_r084_boundary_values_are_valid_and_answered(short: LLM, field: str, value: Any) -> None:
    output = one(short, prompt(4), SamplingParams(**{"seed": 1, field: value}))
    assert output.finished


@pytest.mark.parametrize("bad", [259, -1, 2**31, 2**63, 2**200, 1.5, True, "5", None, [1], math.nan])
@pytest.mark.parametrize("adapter", [None, "red"])
def test_r022_ids_outside_the_vocabulary_are_refused_with_the_limit(short: LLM, bad: Any, adapter: str | None) -> None:
    with pytest.raises(InvalidRequest, match="258") as refused:
        short.generate([prompt(3), {"prompt_token_ids": [1, bad]}], greedy(2), adapter=adapter)
    assert refused.value.param == "prompt"
    assert repr(bad)[:20] in str(refused.value)


def test_r022_the_last_id_of_the_vocabulary_is_fine(short: LLM) -> None:
    assert len(token_ids(one(short, {"prompt_token_ids": [0, 258]}, greedy(2, ignore_eos=True)))) == 2


def test_r022_a_bad_request_runs_nothing_and_keeps_no_adapter(short: LLM) -> None:
    with watched(short) as seen, pytest.raises(InvalidRequest):
        short.generate([prompt(3), {"prompt_token_ids": [999]}], greedy(2), adapter="red")
    assert seen == []


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {259: 1.0}), ("stop_token_ids", [259]), ("stop_token_ids", [2**63])]
)
def test_r080_ids_of_other_vocabularies_in_parameters_are_refused(short: LLM, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        one(short, prompt(3), greedy(2, **{field: value}))
    assert refused.value.param == field
    assert "258" in str(refused.value)


@pytest.mark.parametrize(
    "empty",
    ["", {"prompt_token_ids": []}, {"prompt_token_ids": ()}, {}, [], None, 5, {"prompt_token_ids": None},
     {"prompt_token_ids": 5}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": [[]]}, {"text": "a"}, b"a"],
    ids=repr,
)  # fmt: skip
def test_r079_empty_prompts_and_things_that_are_none_are_refused(short: LLM, empty: Any) -> None:
    for prompts in ([empty], ["a", empty]):
        with pytest.raises(InvalidRequest) as refused:
            short.generate(prompts, greedy(2))
        assert refused.value.param == "prompt"


def test_r079_a_prompt_of_special_tokens_only_is_answered(short: LLM) -> None:
    assert one(short, "<s></s>", greedy(2)).prompt_token_ids == (256, END)
    assert one(short, {"prompt_token_ids": [END]}, greedy(2)).finished


def test_no_prompts_have_no_answers(short: LLM) -> None:
    assert short.generate([], greedy(2)) == []


def test_half_a_surrogate_pair_is_refused(short: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        short.generate(["a\ud83d"], greedy(2))
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest) as refused:
        short.chat([{"role": "user", "content": "a\ud83d"}], greedy(2))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"),
    [(127, 1, True), (128, 1, False), (500, 1, False), (128, 0, True), (129, 0, False), (100, 28, True),
     (100, 29, False), (100, 100, False), (128, None, False), (127, None, True), (1, 2**31 - 1, False)],
)  # fmt: skip
def test_r085_prompt_and_answer_must_fit_the_context(
    short: LLM, prompt_len: int, max_tokens: int | None, fits: bool
) -> None:
    assert short.max_model_len == CONTEXT
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    if fits:
        wanted = CONTEXT - prompt_len if max_tokens is None else max_tokens
        assert len(token_ids(one(short, prompt(prompt_len), params))) == wanted
        return
    with pytest.raises(ContextLengthExceeded, match="128") as refused:
        one(short, prompt(prompt_len), params)
    assert str(prompt_len) in str(refused.value)
    if prompt_len <= CONTEXT and max_tokens is not None:
        assert str(max_tokens) in str(refused.value)


def test_r085_the_last_position_of_the_models_own_context_is_used(llm: LLM, reference: Any) -> None:
    output = one(llm, prompt(511), greedy(1, logprobs=0))
    assert len(token_ids(output)) == 1
    with pytest.raises(ContextLengthExceeded, match="512"):
        one(llm, prompt(512), greedy(1))


def test_r086_over_long_prompts_are_refused_without_work(short: LLM) -> None:
    for huge in ("x" * 10**6, "x" * 129, {"prompt_token_ids": [1] * 10**5}):
        with watched(short) as seen, pytest.raises(ContextLengthExceeded):
            one(short, huge, greedy(1))
        assert seen == []
    with pytest.raises(ContextLengthExceeded):
        short.chat([{"role": "user", "content": "hello"}] * 5000, greedy(1))


def test_r087_without_max_tokens_an_answer_takes_what_is_left(short: LLM) -> None:
    output = one(short, prompt(100), SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    assert len(token_ids(output)) == 28
    assert output.outputs[0].finish_reason == "length"
    (chat,) = short.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=None, temperature=0))
    assert chat.outputs[0].finish_reason in ("stop", "length")


def test_an_unknown_adapter_is_not_answered_by_the_base(short: LLM) -> None:
    for name in ("nope", "Red", "red ", "", "tiny"):
        with pytest.raises(ModelNotFound) as refused:
            one(short, prompt(3), greedy(2), name)
        assert "red" in str(refused.value)


def test_lists_of_another_length_than_the_prompts_are_refused(short: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        short.generate([prompt(3)] * 2, [greedy(2)])
    assert refused.value.param == "params"
    with pytest.raises(InvalidRequest) as refused:
        short.generate([prompt(3)] * 2, greedy(2), adapter=["red"])
    assert refused.value.param == "adapter"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"}, {"max_model_len": 513}, {"max_model_len": 0}, {"kv_cache_bytes": 100}, {"block_size": 0},
        {"max_num_seqs": 0}, {"max_num_batched_tokens": True}, {"prefill_chunk_tokens": 0}, {"device": "tpu9"},
        {"max_model_len": 300, "kv_cache_bytes": 2 * BLOCK_BYTES}, {"adapter_memory_bytes": -1},
        {"adapter_dtype": "float16"},
    ],
    ids=str,
)  # fmt: skip
def test_engine_options_that_cannot_be_met_are_refused_by_name(llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        LLM(llama, **options)
    assert next(iter(options)) in str(refused.value) or "device" in str(refused.value)


def test_unknown_engine_options_are_refused() -> None:
    with pytest.raises(TypeError, match="max_lora_rank"):
        EngineConfig(model="x", max_lora_rank=8)  # type: ignore[call-arg]


def test_a_small_cache_limits_the_context_it_announces(llama: Path) -> None:
    engine = LLM(llama, kv_cache_bytes=2 * BLOCK_BYTES)
    assert engine.max_model_len == 32
    assert len(token_ids(one(engine, prompt(30), greedy(2, ignore_eos=True)))) == 2
    with pytest.raises(ContextLengthExceeded, match="32"):
        one(engine, prompt(30), greedy(3))
    engine.shutdown()


def test_after_shutdown_every_call_says_so(llama: Path) -> None:
    engine = LLM(llama, kv_cache_bytes=4 * BLOCK_BYTES)
    engine.shutdown()
    engine.shutdown()
    for call in (
        lambda: engine.generate(["a"]),
        lambda: engine.logits([1]),
        lambda: engine.adapters,
        lambda: engine.load_adapter("a", "b"),
        lambda: engine.chat([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(EngineClosed):
            call()
