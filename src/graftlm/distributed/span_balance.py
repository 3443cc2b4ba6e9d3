"""When the layers of a pipeline are shared out anew, by what its stages' steps have taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from graftlm.distributed.messages import StageDescription
from graftlm.distributed.partition import spans_of
from graftlm.models.layer_span import LayerSpan
from graftlm.routing.spans import ChainWeights, SpanMover

# Of one check: enough for prompts and decodes to be among them, and for noise to level out.
STEPS_PER_CHECK = 100


class SpanBalance:
    """Adds up what steps take and asks a `SpanMover` now and then.

    Args:
        work, memory: what the layers weigh in work and in bytes.
    """

    def __init__(self, work: ChainWeights, memory: ChainWeights) -> None:
        self._memory = memory
        self._mover = SpanMover(work, memory=memory)
        self._num_steps = 0
        self._seconds: list[float] = []

    def forget(self) -> None:
        """Other workers have come: begin again."""
        self._mover.forget()
        self._num_steps, self._seconds = 0, []

    def note(
        self,
        seconds: Sequence[float],
        *,
        spans: Sequence[LayerSpan],
        descriptions: Sequence[StageDescription],
        reload_seconds: float,
    ) -> tuple[LayerSpan, ...] | None:
        """Count a step. Returns the spans to have from now on, if they are to be others.

        Args:
            seconds: that it took in each stage. spans, descriptions: of the stages. reload_seconds: what a move takes.
        """
        totals = self._seconds or [0.0] * len(seconds)
        self._seconds = [total + own for total, own in zip(totals, seconds, strict=True)]
        self._num_steps += 1
        if self._num_steps < STEPS_PER_CHECK:
            return None
        measured, self._seconds, self._num_steps = self._seconds, [], 0
        num_there = Counter(description.node for description in descriptions)
        bounds = self._mover.check(
            (0, *(span.stop for span in spans)),
            measured,
            reload_seconds=reload_seconds,
            # What it has now it can have again, and its part of what is free.
            memory_bytes=[
                self._memory.of(span.start, span.stop) + place.free_bytes // num_there[place.node]
                for span, place in zip(spans, descriptions, strict=True)
            ],
        )
        return None if bounds is None else spans_of(bounds)
