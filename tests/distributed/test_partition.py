"""What workers can take by what they measured, and layers that are told."""

from __future__ import annotations

from fractions import Fraction

import pytest

from graftlm.distributed.messages import WorkerMeasure
from graftlm.distributed.partition import capacities, explicit_spans, spans_of
from graftlm.errors import ConfigurationError
from graftlm.routing.spans import Capacity


def test_spans_can_be_told() -> None:
    spans = explicit_spans([1, 3], 4)
    assert spans == spans_of([0, 1, 4])
    assert [(span.start, span.stop, span.is_first, span.is_last) for span in spans] == [
        (0, 1, True, False),
        (1, 4, False, True),
    ]


def test_spans_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not add up"):
        explicit_spans([1, 2], 4)


def test_workers_of_one_node_are_as_fast_as_its_fastest_and_share_its_memory() -> None:
    measures = [
        WorkerMeasure(node="big", seconds=1.0, free_bytes=1000),
        WorkerMeasure(node="small", seconds=2.0, free_bytes=300),
        # Something else ran while it was measured.
        WorkerMeasure(node="big", seconds=4.0, free_bytes=1100),
    ]
    big, small = Capacity(speed=Fraction(1), memory_bytes=450), Capacity(speed=Fraction(4, 9), memory_bytes=270)
    assert capacities(measures) == [big, small, big]
