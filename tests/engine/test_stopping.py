"""When an answer ends, and what of it can be read (R026, R063, R064)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM, RequestOutput, SamplingParams
from tests.engine.rig import END, VOCAB, chain_of, greedy, ids_of, make_chain, one, token_ids
from tests.tiny import edit_json

SAYS = "abcSTOPdef"


def engine_over(folder: Path) -> LLM:
    return LLM(folder, kv_cache_bytes=1 << 20, max_model_len=64)


@pytest.fixture
def speaker(tmp_path: Path) -> LLM:
    """Answers 'x' with SAYS, then the end token."""
    chain = [*ids_of("x"), *ids_of(SAYS), END]
    return engine_over(make_chain(tmp_path, chain_of(chain)))


def say(llm: LLM, **params: Any) -> RequestOutput:
    return one(llm, {"prompt_token_ids": ids_of("x")}, greedy(**{"max_tokens": 30, **params}))


def test_r026_the_models_end_token_stops_and_is_no_text(speaker: LLM) -> None:
    (answer,) = say(speaker).outputs
    assert answer.text == SAYS
    assert answer.token_ids == (*ids_of(SAYS), END)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


@pytest.mark.parametrize(
    ("generation_config", "config", "end"),
    [
        ([2, 7, 9], 257, 9),
        ([2, 7, 9], [3], 2),
        (..., [2, 7, 9], 7),
        (None, [2, 7, 9], 9),
        (9, 257, 9),
        (..., 9, 9),
        ([9, 300], 257, 9),
    ],
)
def test_r026_the_end_is_any_id_of_the_config_that_counts(
    tmp_path: Path, generation_config: Any, config: Any, end: int
) -> None:
    folder = make_chain(tmp_path, chain_of([20, 21, end, 22]))
    edit_json(folder / "generation_config.json", eos_token_id=generation_config)
    edit_json(folder / "config.json", eos_token_id=config)
    engine = engine_over(folder)
    request = {"prompt_token_ids": [20]}
    # min_tokens 1 masks every end token once; an id beyond the vocabulary must not get in the way.
    (answer,) = one(engine, request, greedy(10, min_tokens=1)).outputs
    assert answer.token_ids == (21, end)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert token_ids(one(engine, request, greedy(4, ignore_eos=True))) == (21, end, 22, 22)


def test_r026_without_any_config_the_tokenizers_end_token_counts(tmp_path: Path) -> None:
    folder = make_chain(tmp_path, chain_of([20, 21, END, 22]))
    edit_json(folder / "generation_config.json", eos_token_id=...)
    edit_json(folder / "config.json", eos_token_id=...)
    assert token_ids(one(engine_over(folder), {"prompt_token_ids": [20]}, greedy(10))) == (21, END)


def test_r026_ids_that_are_not_in_the_winning_config_do_not_stop(tmp_path: Path) -> None:
    folder = make_chain(tmp_path, chain_of([20, 3, END, 22]))
    edit_json(folder / "generation_config.json", eos_token_id=[2])
    edit_json(folder / "config.json", eos_token_id=[3])
    assert token_ids(one(engine_over(folder), {"prompt_token_ids": [20]}, greedy(5))) == (3, END, 22, 22, 22)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("STOP", "abc", "STOP"),
        (["STOP"], "abc", "STOP"),
        (["ST", "STOP"], "abc", "ST"),
        (["STOP", "TOPd"], "abc", "STOP"),
        (["Pd", "never"], "abcSTO", "Pd"),
        (["a"], "", "a"),
        (["f"], "abcSTOPde", "f"),
    ],
)
def test_r063_a_stop_string_ends_the_answer_before_itself(speaker: LLM, stop: Any, text: str, reason: str) -> None:
    (answer,) = say(speaker, stop=stop).outputs
    assert answer.text == text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", reason)
    # Nothing is computed beyond the token that completed it.
    assert answer.token_ids == tuple(ids_of(SAYS[: SAYS.index(reason) + len(reason)]))


@pytest.mark.parametrize(
    ("stop", "text"), [("STOP", "abcSTOP"), (["ST", "STOP"], "abcST"), (["Pd", "never"], "abcSTOPd"), (["f"], SAYS)]
)
def test_what_ended_an_answer_is_part_of_it_when_asked_for(speaker: LLM, stop: Any, text: str) -> None:
    (answer,) = say(speaker, stop=stop, include_stop_str_in_output=True).outputs
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.token_ids == tuple(ids_of(text))
    (answer,) = say(speaker, stop_token_ids=ids_of("P"), include_stop_str_in_output=True).outputs
    assert (answer.text, answer.stop_reason) == ("abcSTOP", ids_of("P")[0])


def test_special_tokens_are_text_when_they_are_not_skipped(speaker: LLM) -> None:
    (answer,) = say(speaker, ignore_eos=True, max_tokens=len(SAYS) + 1, skip_special_tokens=False).outputs
    assert answer.text == SAYS + "</s>"
    # The token that ends an answer is no part of it, whatever it is, unless that is asked for too.
    (answer,) = say(speaker, skip_special_tokens=False).outputs
    assert answer.text == SAYS
    (answer,) = say(speaker, skip_special_tokens=False, include_stop_str_in_output=True).outputs
    assert answer.text == SAYS + "</s>"
    (answer,) = say(speaker, stop=["P</s>", "</s>"], skip_special_tokens=False, ignore_eos=True).outputs
    assert (answer.text, answer.stop_reason) == (SAYS, "</s>")


@pytest.mark.parametrize("length", range(1, 11))
def test_r063_a_near_miss_at_the_length_limit_is_released(speaker: LLM, length: int) -> None:
    (answer,) = say(speaker, stop=["STOPS", "fx"], max_tokens=length).outputs
    assert answer.text == SAYS[:length]
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_r063_a_near_miss_before_the_end_token_is_released(speaker: LLM) -> None:
    (answer,) = say(speaker, stop=["fx"]).outputs
    assert answer.text == SAYS
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_a_stop_string_on_the_last_allowed_token_is_a_stop(speaker: LLM) -> None:
    (answer,) = say(speaker, stop=["STOP"], max_tokens=7).outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", "STOP")


def test_a_stop_token_id_ends_the_answer_and_is_no_text(speaker: LLM) -> None:
    (stop_id,) = ids_of("P")
    (answer,) = say(speaker, stop_token_ids=[stop_id]).outputs
    assert answer.text == "abcSTO"
    assert answer.token_ids == tuple(ids_of("abcSTOP"))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop_id)
    # It still counts when the model's own end is ignored.
    (answer,) = say(speaker, stop_token_ids=[stop_id], ignore_eos=True).outputs
    assert answer.stop_reason == stop_id


def test_a_stop_token_id_on_the_last_allowed_token_is_a_stop(speaker: LLM) -> None:
    (answer,) = say(speaker, stop_token_ids=ids_of("P"), max_tokens=7).outputs
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == 7


def test_ignoring_the_end_goes_on_to_the_limit(speaker: LLM) -> None:
    (answer,) = say(speaker, ignore_eos=True, max_tokens=15).outputs
    assert answer.token_ids == (*ids_of(SAYS), *[END] * 5)
    assert (answer.text, answer.finish_reason) == (SAYS, "length")


def test_r066_min_tokens_holds_off_end_tokens_stop_tokens_and_stop_strings(speaker: LLM) -> None:
    assert len(token_ids(say(speaker, min_tokens=20))) > 20 - 1
    assert END not in token_ids(say(speaker, min_tokens=20))[:20]
    (answer,) = say(speaker, min_tokens=5, stop=["b", "O", "e"]).outputs
    assert (answer.text, answer.stop_reason) == ("abcSTOPd"[:5], "O")
    (answer,) = say(speaker, min_tokens=6, stop=["b", "O", "e"]).outputs
    assert (answer.text, answer.stop_reason) == ("abcSTOPd", "e")
    stop_ids = ids_of("b")
    answers = say(speaker, min_tokens=2, stop_token_ids=stop_ids).outputs
    assert answers[0].token_ids[:2] != tuple(ids_of("ab"))


def test_min_tokens_with_every_id_a_stop_token_still_ends(speaker: LLM) -> None:
    (answer,) = say(speaker, min_tokens=2, stop_token_ids=range(VOCAB)).outputs
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == 3


def test_n_answers_end_each_for_itself(tmp_path: Path) -> None:
    """After 'x' comes one of four letters, then the end: lengths and texts differ, one finish each."""
    table = chain_of([*ids_of("abcd"), END])
    for token_id in ids_of("abcd"):
        table[ids_of("x")[0], token_id] = 30.0
    engine = engine_over(make_chain(tmp_path, table))
    params = SamplingParams(max_tokens=3, n=20, seed=5)
    output = one(engine, {"prompt_token_ids": ids_of("x")}, params)
    ends = {(answer.text, answer.finish_reason) for answer in output.outputs}
    assert ends == {("abc", "length"), ("bcd", "length"), ("cd", "stop"), ("d", "stop")}
    assert output.finished


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_r064_an_answer_cut_inside_a_character_ends_in_a_replacement_character(tmp_path: Path, cut: int) -> None:
    engine = engine_over(make_chain(tmp_path, chain_of([0, *emoji_ids(), 5])))
    (answer,) = one(engine, {"prompt_token_ids": [0]}, greedy(cut)).outputs
    assert answer.text == ("😀" if cut == 4 else "\ufffd")


def emoji_ids() -> list[int]:
    """Ids of the four bytes of 😀 in the byte-level alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")
    return [alphabet.index(char) for piece, _ in pieces for char in piece]
