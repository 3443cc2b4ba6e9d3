"""Documents of several jobs packed one after the other: the batch type of serving, with nothing cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.key_values import PackedKeyValues
from graftlm.layers.patch import ModelPatch, Segment
from graftlm.models.decoder import Decoder
from graftlm.training.document import Document


@dataclass(frozen=True, kw_only=True)
class Share:
    """One job's documents in a batch, and its adapter as it is now."""

    patch: ModelPatch
    documents: tuple[Document, ...]

    @property
    def num_rows(self) -> int:
        return sum(num_rows(document) for document in self.documents)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a job learns from a batch: `rows` [n] int64, whose next tokens are `token_ids` [n] int64, of its documents
    number `documents` [n] int64."""

    patch: ModelPatch
    rows: Tensor
    token_ids: Tensor
    documents: Tensor
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """targets: of each share, in order."""

    batch: RaggedBatch
    key_values: PackedKeyValues
    targets: tuple[Targets, ...]


def num_rows(document: Document) -> int:
    """Rows a document takes: nothing depends on what follows the token before the last that is learnt."""
    return document.targets[-1]


def pack(shares: Sequence[Share], decoder: Decoder) -> PackedBatch:
    """One batch of all shares. Positions start anew with each document, and no token sees another document's."""
    token_ids: list[int] = []
    positions: list[int] = []
    document_lens: list[int] = []
    lengths: list[int] = []
    segments: list[Segment] = []
    targets: list[Targets] = []
    for share in shares:
        first_row = len(token_ids)
        rows: list[int] = []
        next_ids: list[int] = []
        numbers: list[int] = []
        for number, document in enumerate(share.documents):
            length = num_rows(document)
            rows += [len(token_ids) + place - 1 for place in document.targets]
            next_ids += [document.token_ids[place] for place in document.targets]
            numbers += [number] * len(document.targets)
            token_ids += document.token_ids[:length]
            positions += range(length)
            document_lens += [len(document.token_ids)] * length
            lengths.append(length)
        segments.append(Segment(start=first_row, stop=len(token_ids), patch=share.patch))
        targets.append(
            Targets(
                patch=share.patch,
                rows=_integers(rows, decoder.device),
                token_ids=_integers(next_ids, decoder.device),
                documents=_integers(numbers, decoder.device),
                num_documents=len(share.documents),
            )
        )
    lens = _integers(document_lens, decoder.device)
    batch = RaggedBatch(
        token_ids=_integers(token_ids, decoder.device),
        positions=_integers(positions, decoder.device),
        prompt_lens=lens,
        sequence_lens=lens,
        segments=tuple(segments),
        logit_rows=_integers([], decoder.device),
        logit_segments=(),
    )
    key_values = PackedKeyValues(lengths, decoder.windows, decoder.device)
    return PackedBatch(batch=batch, key_values=key_values, targets=tuple(targets))


def _integers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
