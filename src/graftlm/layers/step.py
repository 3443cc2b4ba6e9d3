"""What all layers share while one batch is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.key_values import DepthKeyValues, KeyValues
from graftlm.layers.rotary import Angles, RotaryEmbedding
from graftlm.layers.segments import Segment, Segments


@dataclass(frozen=True, kw_only=True)
class DecoderStep:
    """The batch, its keys and values, and the angles of its tokens under each rotary embedding.

    layer_inputs: [T, P] by layer, where layers have inputs of their own.
    """

    batch: RaggedBatch
    key_values: KeyValues
    angles: Mapping[RotaryEmbedding, Angles]
    layer_inputs: Mapping[int, Tensor] = field(default_factory=dict)

    def at_depth(self, depth: int, *, place: int, num_layers: int) -> DecoderStep:
        """The step as a layer sees it that stands at `depth` in the adapters' stack: the place-th there of a span that
        has `num_layers`."""
        segments = Segments(
            Segment(start=segment.start, stop=segment.stop, patch=segment.patch.stack.patches[depth])
            for segment in self.batch.segments
            if segment.patch.stack is not None
        )
        key_values = DepthKeyValues(key_values=self.key_values, layer=place % num_layers, table=place // num_layers)
        return replace(self, batch=replace(self.batch, segments=segments), key_values=key_values)
