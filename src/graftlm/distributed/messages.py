"""What the engine and its workers tell each other. Plain data that pickles; every step says whose it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.adapters import Adapter
from graftlm.config import EngineConfig
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.models.layer_span import LayerSpan


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A tensor as bytes that pickle without a copy, whatever its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: NDArray[np.uint8]

    @staticmethod
    def of(tensor: Tensor) -> PackedTensor:
        content: NDArray[Any] = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return PackedTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), content=content)

    def unpack(self) -> Tensor:
        """A tensor of its own: the bytes may lie in memory that is shared, and must not be written to."""
        if not self.content.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.content.copy()).view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A worker's place among those that share a stage out by tensors. rendezvous: where they meet, as their pool
    calls it."""

    rank: int
    size: int
    rendezvous: str


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a worker loads. num_blocks: of each cache group of the whole model. place: if others share the stage."""

    config: EngineConfig
    span: LayerSpan
    num_blocks: tuple[int, ...]
    place: RankPlace | None = None


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """Where a stage is. node: as the workers' engine calls it. free_bytes: memory that could be taken there.
    others: the ranks after the first, where several share the stage."""

    node: str
    pid: int
    free_bytes: int
    others: tuple[StageDescription, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerMeasure:
    """What a worker can do. seconds: that a probe took. free_bytes: memory that could be taken on its node, by it and
    all others there."""

    node: str
    seconds: float
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """weight: in a weighted sum; None for an adapter that stands alone."""

    name: str
    source: Path
    digest: str
    weight: float | None


@dataclass(frozen=True, kw_only=True)
class AdapterRecipe:
    """How to get an adapter's weights. digest: of the whole. parts: one, or those of a weighted sum."""

    name: str
    digest: str
    parts: tuple[AdapterPart, ...]

    @staticmethod
    def of(adapter: Adapter) -> AdapterRecipe:
        parts = tuple(_part(part, weight) for part, weight in adapter.parts or ((adapter, None),))
        return AdapterRecipe(name=adapter.name, digest=adapter.digest, parts=parts)


@dataclass(frozen=True, kw_only=True)
class StepKey:
    """epoch: grows whenever a worker is replaced. number: of the step, counted from 1 within the epoch."""

    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True)
class StageStep:
    """One step for one stage.

    after: the step whose result it goes on from: this one's, which the stage before gives, or where layers go back to
        earlier stages the one before, which the last stage gives. None for the first stage, which embeds.
    depths: which places of the stack of layers that the sequences' adapters have are computed now; None if these have
        the decoder's own.
    replays: computed besides the sequences, again, for what this stage has lost of them.
    recalled: of which it gives on what it gave when it computed them, behind what it gives for the sequences; the next
        stage's `replays`.
    """

    key: StepKey
    sequences: tuple[ScheduledSequence, ...]
    after: StepKey | None
    depths: range | None = None
    replays: tuple[ScheduledSequence, ...] = ()
    recalled: tuple[ScheduledSequence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """num_tokens: that were computed, num_replayed_tokens: of them for the second time. compute_seconds: what a step
    took. waited_seconds: from the end of the one before until it began. hop_bytes: of what it was given and of what it
    gave. adapter_bytes: that the stage holds."""

    num_tokens: int
    num_replayed_tokens: int
    compute_seconds: float
    waited_seconds: float
    hop_bytes: int
    adapter_bytes: int


@dataclass(frozen=True, kw_only=True)
class StageReply:
    """output: [T, E], T those of the sequences and of what was recalled, or of the last stage the logits, [N, V]; of
    ranks after the first nothing.
    reports: of all stages up to this one, as often as the sequences came through."""

    key: StepKey
    output: PackedTensor
    reports: tuple[StageReport, ...]


def _part(adapter: Adapter, weight: float | None) -> AdapterPart:
    if adapter.source is None:
        raise ValueError(f"{adapter.name} was not read from a file")
    return AdapterPart(name=adapter.name, source=adapter.source.absolute(), digest=adapter.digest, weight=weight)
