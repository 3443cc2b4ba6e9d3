"""Stop strings over texts cut into arbitrary pieces (R063)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.text import StopStringFilter

LETTERS = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop that is complete when it is read letter by letter, and that stop."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, derandomize=True, database=None, max_examples=1500)
@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_r063_the_pieces_join_to_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected, stop = cut(text, stops)
    stop_filter = StopStringFilter(stops)
    shown = ""
    read = ""
    for piece in pieces:
        read += piece
        shown += stop_filter.push(piece)
        assert expected.startswith(shown)
        if stop_filter.matched is not None:
            break
        # Held back is the longest end that may still become a stop, and not a letter more.
        held = max((size for size in range(len(read) + 1) if is_beginning(read[len(read) - size :], stops)), default=0)
        assert shown == read[: len(read) - held]
    else:
        shown += stop_filter.flush()
    assert shown == expected
    assert stop_filter.matched == stop


def is_beginning(end: str, stops: list[str]) -> bool:
    return end == "" or any(len(end) < len(stop) and stop.startswith(end) for stop in stops)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS, data=st.data())
def test_r063_where_the_text_is_cut_into_tokens_does_not_matter(
    pieces: list[str], stops: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(text), max_size=len(text)))
    other, start = [], 0
    for size in sizes:
        other.append(text[start : start + size])
        start += size
    assert run(pieces, stops) == run(other, stops)


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    stop_filter = StopStringFilter(stops)
    shown = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        if stop_filter.matched is not None:
            return shown, stop_filter.matched
    return shown + stop_filter.flush(), None
