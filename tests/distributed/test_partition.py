"""Which worker gets which layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.distributed.partition import balanced_spans, explicit_spans
from graftlm.errors import ConfigurationError
from graftlm.models.layer_span import LayerSpan


def bounds(spans: tuple[LayerSpan, ...]) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in spans]


def heaviest(cuts: tuple[int, ...], weights: list[int], before: int, after: int) -> int:
    shares = [sum(weights[start:stop]) for start, stop in itertools.pairwise((0, *cuts, len(weights)))]
    shares[0] += before
    shares[-1] += after
    return max(shares)


def test_equal_layers_are_shared_out_evenly() -> None:
    assert bounds(balanced_spans([5] * 6, 3, before=0, after=0)) == [(0, 2), (2, 4), (4, 6)]


def test_who_has_the_head_gets_fewer_layers() -> None:
    assert bounds(balanced_spans([10] * 6, 2, before=0, after=20)) == [(0, 4), (4, 6)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 60), st.integers(1, 8))
def test_no_other_spans_have_a_lighter_heaviest(weights: list[int], before: int, after: int, num_workers: int) -> None:
    num_workers = min(num_workers, len(weights))
    spans = balanced_spans(weights, num_workers, before=before, after=after)
    assert (spans[0].is_first, spans[-1].is_last, len(spans)) == (True, True, num_workers)
    chosen = tuple(span.stop for span in spans[:-1])
    all_cuts = itertools.combinations(range(1, len(weights)), num_workers - 1)
    best = min(heaviest(cuts, weights, before, after) for cuts in all_cuts)
    assert heaviest(chosen, weights, before, after) == best


def test_spans_can_be_told() -> None:
    assert bounds(explicit_spans([1, 3], 4)) == [(0, 1), (1, 4)]


def test_spans_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more workers than layers; got: 5; allowed: 1 to 4"):
        balanced_spans([1] * 4, 5, before=0, after=0)
    with pytest.raises(ConfigurationError, match="does not add up"):
        explicit_spans([1, 2], 4)
