"""Characters that span tokens (R064)."""

from __future__ import annotations

import pytest

from graftlm.text import IncrementalDetokenizer, Tokenizer

TEXTS = {
    "emoji": "ok 😀!",
    "emoji with joiners": "a 👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "emoji with skin tone": "👍🏽👋🏿",
    "flag": "🇩🇪🇯🇵",
    "thai": "สวัสดีครับ กำลัง",
    "cjk": "漢字かな交じり文、中文。한국어",
    "combining": "e\u0301 a\u0308",
    "right to left": "שלום مرحبا",
    "replacement character itself": "a\ufffdb",
}


def pieces_of(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in answer), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_r064_a_character_arrives_whole_and_with_its_last_byte(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert len(ids) == len(text.encode())
    pieces = pieces_of(byte_level, byte_level.encode("prompt "), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        # One character per non-empty piece, in the step of its last byte.
        assert [piece for piece in pieces if piece] == list(text)
        ends = {len(text[:count].encode()) - 1 for count in range(1, len(text) + 1)}
        assert {index for index, piece in enumerate(pieces) if piece} == ends


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_r064_characters_of_byte_fallback_tokenizers_arrive_whole(metaspace: Tokenizer, text: str) -> None:
    ids = metaspace.encode(f"a{text}", add_special_tokens=False)
    pieces = pieces_of(metaspace, metaspace.encode("b"), ids)
    assert "".join(pieces) == f" a{text}"
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_r064_an_answer_cut_inside_a_character_ends_in_one_replacement_character(
    byte_level: Tokenizer, cut: int
) -> None:
    ids = byte_level.encode("hi 😀")[: 3 + cut]
    pieces = pieces_of(byte_level, [], ids)
    assert pieces == ["h", "i", " ", *[""] * cut, "\ufffd"]


def test_r064_invalid_bytes_become_replacement_characters_and_the_text_goes_on(byte_level: Tokenizer) -> None:
    lone_continuation, emoji, letter = byte_level.encode("é")[1:], byte_level.encode("😀"), byte_level.encode("x")
    pieces = pieces_of(byte_level, [], [*letter, *lone_continuation, *emoji[:2], *letter, *emoji])
    assert "".join(pieces) == "x\ufffd\ufffdx😀"


def test_r064_special_tokens_have_no_text_and_split_nothing(byte_level: Tokenizer, metaspace: Tokenizer) -> None:
    emoji = byte_level.encode("😀")
    assert "".join(pieces_of(byte_level, [256], [256, *emoji[:2], 258, *emoji[2:], 257])) == "😀"
    a, marker_a = metaspace.encode("ba", add_special_tokens=False)[-1:], metaspace.encode("a", add_special_tokens=False)
    assert "".join(pieces_of(metaspace, [1], [*a, 2, *marker_a, 1, 2, *marker_a])) == "a a a"


def test_the_first_word_of_an_answer_keeps_its_space(metaspace: Tokenizer) -> None:
    prompt = metaspace.encode("b")
    assert pieces_of(metaspace, prompt, metaspace.encode("a", add_special_tokens=False)) == [" a", ""]
    # Also when the prompt ends in special tokens, which have no text.
    assert pieces_of(metaspace, [*prompt, *[2] * 9], metaspace.encode("a", add_special_tokens=False)) == [" a", ""]


def test_ids_the_tokenizer_does_not_know_have_no_text(byte_level: Tokenizer) -> None:
    assert pieces_of(byte_level, [999], [999, *byte_level.encode("a"), 400]) == ["", "a", "", ""]
