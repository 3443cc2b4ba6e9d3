"""Documents of several jobs packed one after the other: the batch type of serving, with nothing cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.key_values import PackedKeyValues
from graftlm.layers.patch import ModelPatch
from graftlm.layers.segments import Segment, Segments
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
    """What is learnt from a batch.

    rows: [n] int64, of the batch; token_ids: [n] int64, what follows each. documents: [n] int64, the number of the
    document each belongs to. segments: of the n, those under one adapter.
    """

    rows: Tensor
    token_ids: Tensor
    documents: Tensor
    num_documents: int
    segments: Segments


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """targets: of each share, in order, its documents counted from 0."""

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
                rows=_integers(rows, decoder.device),
                token_ids=_integers(next_ids, decoder.device),
                documents=_integers(numbers, decoder.device),
                num_documents=len(share.documents),
                segments=Segments([Segment(start=0, stop=len(rows), patch=share.patch)]),
            )
        )
    lens = _integers(document_lens, decoder.device)
    batch = RaggedBatch(
        token_ids=_integers(token_ids, decoder.device),
        positions=_integers(positions, decoder.device),
        prompt_lens=lens,
        sequence_lens=lens,
        segments=Segments(segments),
        logit_rows=_integers([], decoder.device),
        logit_segments=Segments(),
    )
    key_values = PackedKeyValues(lengths, decoder.windows, decoder.device, shared=decoder.shared_kv_layers)
    return PackedBatch(batch=batch, key_values=key_values, targets=tuple(targets))


def join(targets: Sequence[Targets]) -> Targets:
    """Those of several shares as one; documents are counted on."""
    documents: list[Tensor] = []
    segments: list[Segment] = []
    num_rows, num_documents = 0, 0
    for own in targets:
        documents.append(own.documents + num_documents)
        segments += [
            replace(segment, start=num_rows + segment.start, stop=num_rows + segment.stop) for segment in own.segments
        ]
        num_rows += len(own.rows)
        num_documents += own.num_documents
    return Targets(
        rows=torch.cat([own.rows for own in targets]),
        token_ids=torch.cat([own.token_ids for own in targets]),
        documents=torch.cat(documents),
        num_documents=num_documents,
        segments=Segments(segments),
    )


def _integers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
