"""Where tokens begin in a text, when their own texts do not simply add up to it."""

from __future__ import annotations

import pytest

from graftlm.server.logprobs import text_offsets


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (["ab", "c", "d"], "abcd", [0, 2, 3]),
        (["<s>", "a", "b"], "ab", [0, 0, 1]),
        (["\ufffd", "\ufffd", "\ufffd", "x"], "€x", [0, 0, 0, 1]),
        (["\ufffd", "x"], "\ufffdx", [0, 1]),
        (["\ufffd", "\ufffd", "x"], "\ufffdx", [0, 1, 1]),
        (["a", "", "b"], "ab", [0, 1, 1]),
        (["S", "T"], "", [0, 0]),
        ([], "", []),
    ],
)
def test_offsets_point_to_where_each_token_begins(tokens: list[str], text: str, offsets: list[int]) -> None:
    assert text_offsets(tokens, text) == offsets
