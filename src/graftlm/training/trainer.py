"""The loop: updates of all jobs, over one base in memory."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from graftlm.errors import TrainingFailed
from graftlm.layers.patch import ModelPatch
from graftlm.models.decoder import Decoder
from graftlm.training.document import Document
from graftlm.training.job_run import JobRun
from graftlm.training.loss import backward, document_losses
from graftlm.training.pace import Pace
from graftlm.training.packed_batch import Share, num_rows, pack

Result = TypeVar("Result")

# Rows up to which documents of several jobs share a forward pass: below, a pass costs mostly the reading of the base's
# weights, which is then done once; above, it costs arithmetic, of which there is no less together.
MIX_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A forward pass's worth of one job's update. first_document: number of its first document in the update."""

    run: JobRun
    documents: tuple[Document, ...]
    first_document: int
    num_terms: int

    @property
    def num_rows(self) -> int:
        return sum(num_rows(document) for document in self.documents)

    def divided(self, max_rows: float) -> list[_Part]:
        """The part in pieces of at most so many rows, or of one example."""
        pieces: list[list[Document]] = []
        room = 0.0
        for example in self.run.objective.examples(self.documents):
            rows = sum(num_rows(document) for document in example)
            if rows > room or not pieces:
                pieces.append([])
                room = max_rows
            pieces[-1] += example
            room -= rows
        firsts = accumulate((len(piece) for piece in pieces), initial=self.first_document)
        return [
            replace(self, documents=tuple(piece), first_document=first)
            for piece, first in zip(pieces, firsts, strict=False)
        ]


class Trainer:
    """Trains jobs side by side. What one does never changes what another learns: a loss is a mean over the job's own
    tokens, and clip, schedule, optimiser and the check for NaN are the job's own too.

    Args:
        recompute_layers: compute each layer again in the backward pass instead of keeping what is in it.
        mix_rows: most rows of several jobs in one forward pass.
        pace: how large a forward pass may be at all; without one, a job's batch is a pass.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        recompute_layers: bool = False,
        mix_rows: int = MIX_ROWS,
        pace: Pace | None = None,
    ) -> None:
        self._decoder = decoder
        self._recompute_layers = recompute_layers
        self._mix_rows = mix_rows
        self._pace = pace
        self.runs: list[JobRun] = []

    def add(self, run: JobRun) -> None:
        """Let a job take part from the next update on."""
        self.runs.append(run)

    def step(self) -> list[JobRun]:
        """One update of every job that is running; those jobs."""
        return _run_through(self.update())

    def update(self) -> Generator[int, None, list[JobRun]]:
        """As `step`, pass by pass: before each it yields how many rows that has, so that whoever drives it chooses the
        moment. A job that fails meanwhile is left as it is."""
        running = [run for run in self.runs if run.state == "running"]
        micro_batches = {run: run.micro_batches() for run in running}
        documents = {run: [document for batch in micro_batches[run] for document in batch] for run in running}
        num_terms = {run: run.objective.num_terms(documents[run]) for run in running}
        sums: dict[JobRun, dict[str, float]] = {run: defaultdict(float) for run in running}
        for number in range(max((run.job.accumulate for run in running), default=0)):
            parts = [
                _Part(
                    run=run,
                    documents=micro_batches[run][number],
                    first_document=sum(len(batch) for batch in micro_batches[run][:number]),
                    num_terms=num_terms[run],
                )
                for run in running
                if number < run.job.accumulate
            ]
            for together in self._passes(parts):
                yield sum(part.num_rows for part in together)
                for part, found in zip(together, self._backward(together), strict=True):
                    for name, value in found.items():
                        sums[part.run][name] += value
        for run in running:
            if run.state == "failed":
                continue
            means = {name: total / num_terms[run] for name, total in sums[run].items()}
            run.update(means, documents[run])
            if run.is_measured():
                run.measure((yield from self._held_out_loss(run)))
            try:
                run.record()
            except TrainingFailed as failure:
                run.fail(str(failure))
        return running

    def train(self, *, report: Callable[[JobRun], None], is_stopped: Callable[[], bool]) -> None:
        """Make updates until no job is running, or until `is_stopped`: then every job has a checkpoint.

        Args:
            report: called after each update of a job.

        Raises:
            TrainingFailed: a checkpoint cannot be written.
        """
        while any(run.state == "running" for run in self.runs):
            if is_stopped():
                for run in self.runs:
                    if run.state in ("running", "paused"):
                        run.save()
                return
            for run in self.step():
                report(run)

    def held_out_loss(self, run: JobRun) -> float:
        """Mean over all terms of what the job holds out."""
        return _run_through(self._held_out_loss(run))

    def _held_out_loss(self, run: JobRun) -> Generator[int, None, float]:
        with torch.no_grad():
            patch = run.trainable.patch()
        total, num_terms = 0.0, 0
        size = run.job.batch_size
        for start in range(0, len(run.held_out), size):
            documents = tuple(document for example in run.held_out[start : start + size] for document in example)
            for (part,) in self._passes([_Part(run=run, documents=documents, first_document=0, num_terms=0)]):
                yield part.num_rows
                with self._timed([part]):
                    shares = [Share(patch=patch, documents=part.documents)]
                    (losses,) = document_losses(self._decoder, pack(shares, self._decoder))
                    (reference,) = self._references([part])
                total += float(run.objective.sums(losses, reference)["loss"])
                num_terms += run.objective.num_terms(part.documents)
        return total / num_terms

    def _backward(self, parts: Sequence[_Part]) -> list[dict[str, float]]:
        """Add the parts' gradients to their parameters; their objectives' sums."""
        shares = [
            Share(patch=part.run.patch(part.documents, part.first_document), documents=part.documents) for part in parts
        ]
        with self._timed(parts):
            references = self._references(parts)
            losses = backward(
                self._decoder,
                pack(shares, self._decoder),
                [
                    part.run.objective.slopes(part.num_terms, reference)
                    for part, reference in zip(parts, references, strict=True)
                ],
                recompute_layers=self._recompute_layers,
            )
        return [
            {name: float(value) for name, value in part.run.objective.sums(own, reference).items()}
            for part, own, reference in zip(parts, losses, references, strict=True)
        ]

    @contextmanager
    def _timed(self, parts: Sequence[_Part]) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if self._pace is not None:
            self._pace.record(sum(part.num_rows for part in parts), time.perf_counter() - begun)

    def _references(self, parts: Sequence[_Part]) -> list[Tensor | None]:
        """Losses of the documents with no adapter, for the parts that compare with them.

        They are computed anew in each epoch: kept values would come from other batches after a resumption, and differ
        in the last bit.
        """
        compared = [part for part in parts if part.run.objective.needs_reference]
        if not compared:
            return [None] * len(parts)
        shares = [Share(patch=ModelPatch(), documents=part.documents) for part in compared]
        found = iter(document_losses(self._decoder, pack(shares, self._decoder)))
        return [next(found) if part.run.objective.needs_reference else None for part in parts]

    def _passes(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """What is computed in one pass each, in order. Parts share a pass within `mix_rows`; one that is larger than
        the pace allows is divided, down to single examples."""
        left = list(parts)
        while left:
            limit = math.inf if self._pace is None else self._pace.max_rows
            first, *left = [*left[0].divided(limit), *left[1:]]
            together, rows = [first], first.num_rows
            while left and rows + left[0].num_rows <= min(self._mix_rows, limit):
                part, *left = left
                together.append(part)
                rows += part.num_rows
            yield together


def _run_through(passes: Generator[int, None, Result]) -> Result:
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: Result = end.value
            return result
