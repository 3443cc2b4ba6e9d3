"""What a job minimises: a mean over terms, as a function of the documents' negative log-probabilities.

A document's is the sum over the tokens that are learnt of it, [documents]; the reference's is the same with the adapter
off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.training.document import Document, Example
from graftlm.training.job import TrainingJob
from graftlm.training.loss import Slopes


class Objective(Protocol):
    """needs_reference: whether it compares with the base."""

    @property
    def needs_reference(self) -> bool: ...

    def examples(self, documents: Sequence[Document]) -> list[Example]:
        """The documents by the rows they are from."""
        ...

    def num_terms(self, documents: Sequence[Document]) -> int:
        """What the sums are divided by to give means."""
        ...

    def sums(self, losses: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        """The loss's sum over terms, and others to be known, by name; float64 scalars."""
        ...

    def slopes(self, num_terms: int, reference: Tensor | None) -> Slopes | float:
        """Derivative of the loss with respect to each document's negative log-probability: a number for all, or a
        function of them."""
        ...


class Likelihood:
    """Each token's negative log-probability is a term."""

    needs_reference = False

    def examples(self, documents: Sequence[Document]) -> list[Example]:
        return [(document,) for document in documents]

    def num_terms(self, documents: Sequence[Document]) -> int:
        return sum(len(document.targets) for document in documents)

    def sums(self, losses: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        return {"loss": losses.sum()}

    def slopes(self, num_terms: int, reference: Tensor | None) -> Slopes | float:
        return 1 / num_terms


class Preference:
    """Direct preference optimisation: of two documents that follow each other, the first is preferred.

    Semantics: with r the log-probability less the reference's, and m = beta * (r_chosen - r_rejected), a pair's loss is
    -log sigmoid(m). `accuracy` is the part of pairs with m > 0, `margin` the mean of m.
    Source: arXiv 2305.18290, equation 7.
    """

    needs_reference = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def examples(self, documents: Sequence[Document]) -> list[Example]:
        return list(zip(documents[::2], documents[1::2], strict=True))

    def num_terms(self, documents: Sequence[Document]) -> int:
        return len(documents) // 2

    def sums(self, losses: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        margins = self._margins(losses, reference)
        return {
            "loss": -functional.logsigmoid(margins).sum(),
            "accuracy": (margins > 0).sum(dtype=margins.dtype),
            "margin": margins.sum(),
        }

    def slopes(self, num_terms: int, reference: Tensor | None) -> Slopes | float:
        def of(losses: Tensor) -> Tensor:
            slope = self._beta * torch.sigmoid(-self._margins(losses, reference)) / num_terms
            return torch.stack((slope, -slope), dim=1).flatten()

        return of

    def _margins(self, losses: Tensor, reference: Tensor | None) -> Tensor:
        if reference is None:
            raise ValueError("a preference is measured against a reference")
        chosen, rejected = (reference - losses).reshape(-1, 2).unbind(dim=1)
        return self._beta * (chosen - rejected)


def objective_of(job: TrainingJob) -> Objective:
    """What a job's options ask for."""
    return Preference(job.beta) if job.objective == "dpo" else Likelihood()
