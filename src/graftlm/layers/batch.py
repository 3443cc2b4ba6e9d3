"""The ragged batch: everything one step of the decoder needs, with no padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graftlm.layers.segments import Segments


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """S sequences with T new tokens in all, packed one after the other; rows of one adapter stand together.

    token_ids: [T] int64.
    positions: [T] int64, each token's position in its own sequence.
    prompt_lens: [T] int64, the length of the prompt of each token's sequence.
    sequence_lens: [T] int64, all tokens known of each token's sequence, computed or not.
    segments: adapters over the T rows; rows outside them are the base's.
    logit_rows: [N] int64, the rows whose logits are wanted, ascending.
    logit_segments: the same adapters over those N rows.
    layers: those that all sequences run through, in this order, if they are not the decoder's, each once.
    depths: which of those places are computed now; None for all. They are all of the span's, or the layers go back and
        forth between spans.
    """

    token_ids: Tensor
    positions: Tensor
    prompt_lens: Tensor
    sequence_lens: Tensor
    segments: Segments
    logit_rows: Tensor
    logit_segments: Segments
    layers: tuple[int, ...] | None = None
    depths: range | None = None

    @property
    def reaches_end(self) -> bool:
        """Whether no layers are left after those that are computed now."""
        return self.layers is None or self.depths is None or self.depths.stop == len(self.layers)
