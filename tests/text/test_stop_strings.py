"""Stop strings, of which nothing may be seen (R063)."""

from __future__ import annotations

import pytest

from graftlm.text import StopStringFilter


def shown(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """What each piece makes visible, with the flush at the end when nothing matched."""
    stop_filter = StopStringFilter(stops)
    parts = []
    for piece in pieces:
        parts.append(stop_filter.push(piece))
        if stop_filter.matched is not None:
            return parts, stop_filter.matched
    return [*parts, stop_filter.flush()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (list("abc STOP def"), ["STOP"], "abc ", "STOP"),
        (["abc STOP def"], ["STOP"], "abc ", "STOP"),
        (list("abc STOP def"), ["ST", "STOP"], "abc ", "ST"),
        (["abc STOP def"], ["STOP", "ST"], "abc ", "ST"),
        (["abc", " S", "T", "O", "P def"], ["STOP"], "abc ", "STOP"),
        (["abc ST", "OP def"], ["STOP"], "abc ", "STOP"),
        (["STOP"], ["STOP"], "", "STOP"),
        (list("SSTSTOP"), ["STOP"], "SST", "STOP"),
        (list("abababc"), ["ababc"], "ab", "ababc"),
        (list("one\n\ntwo"), ["\n\n"], "one", "\n\n"),
        (list("a👩‍👧b"), ["\u200d"], "a👩", "\u200d"),
    ],
)
def test_r063_the_text_ends_before_the_stop(pieces: list[str], stops: list[str], text: str, matched: str) -> None:
    parts, found = shown(pieces, stops)
    assert "".join(parts) == text
    assert found == matched


@pytest.mark.parametrize("near_miss", ["S", "ST", "STO", "STOSTO", "STO P"])
def test_r063_a_near_miss_is_released_at_the_end(near_miss: str) -> None:
    parts, matched = shown(list(f"abc {near_miss}"), ["STOP"])
    assert "".join(parts) == f"abc {near_miss}"
    assert matched is None


def test_r063_a_near_miss_is_released_as_soon_as_it_is_one() -> None:
    assert shown(["a", "S", "T", "O", "x", "b"], ["STOP"]) == (["a", "", "", "", "STOx", "b", ""], None)
    # The end of a near miss may be the beginning of the next try.
    assert shown(["S", "T", "S", "T", "x"], ["STOP"]) == (["", "", "ST", "", "STx", ""], None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert shown(["a", "", "b"], []) == (["a", "", "b", ""], None)
