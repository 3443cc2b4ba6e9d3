"""Incremental text against decoding everything at once (R064)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.text import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.text.tokenizers import write_metaspace_tokenizer
from tests.tiny import write_tokenizer

IDS = st.lists(st.integers(0, 261), max_size=40)
TEXT = st.text(st.sampled_from("ab  é€😀👩‍👧กำ漢\ufffd\n"), max_size=12)
PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=400)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2: words begin with a marker, a leading space is stripped, unknown characters fall back to bytes."""
    folder: Path = tmp_path_factory.mktemp("metaspace")
    write_metaspace_tokenizer(folder)
    return load_tokenizer(folder)


def check(tokenizer: Tokenizer, prompt: list[int], answer: list[int], *, skip_special_tokens: bool = True) -> None:
    """Nothing is lost, nothing comes early, and nothing complete is held back."""
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    before, whole = decode(prompt), decode([*prompt, *answer])
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    shown = ""
    for count, token_id in enumerate(answer, 1):
        shown += detokenizer.push(token_id)
        text = decode([*prompt, *answer[:count]])
        assert whole.startswith(before + shown)
        if not text.endswith("\ufffd"):
            assert before + shown == text
    shown += detokenizer.flush()
    assert before + shown == whole


@PROPERTY
@given(prompt=TEXT, answer=IDS)
def test_r064_special_tokens_that_are_wanted_are_text_like_any(
    byte_level: Tokenizer, prompt: str, answer: list[int]
) -> None:
    check(byte_level, byte_level.encode(prompt.replace("\ufffd", "")), answer, skip_special_tokens=False)


@PROPERTY
@given(prompt=TEXT, answer=IDS)
def test_r064_any_bytes_after_any_prompt_join_to_the_decoded_text(
    byte_level: Tokenizer, prompt: str, answer: list[int]
) -> None:
    # Ids 256 to 258 are special and 259 to 261 unknown to the tokenizer: a model's vocabulary may be padded.
    check(byte_level, byte_level.encode(prompt.replace("\ufffd", "")), answer)


@PROPERTY
@given(prompt=TEXT, answer=st.lists(TEXT | st.sampled_from(["<s>", "</s>"]), max_size=6))
def test_r064_special_ids_inside_an_answer_do_not_eat_the_space_after_them(
    metaspace: Tokenizer, prompt: str, answer: list[str]
) -> None:
    answer_ids = [token_id for piece in answer for token_id in metaspace.encode(piece, add_special_tokens=False)]
    check(metaspace, metaspace.encode(prompt.replace("\ufffd", "")), answer_ids)
