"""What all layers share while one batch is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.key_values import KeyValues
from graftlm.layers.rotary import Angles, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class DecoderStep:
    """The batch, its keys and values, and the angles of its tokens under each rotary embedding.

    layer_inputs: [T, P] for each layer, where layers have inputs of their own.
    """

    batch: RaggedBatch
    key_values: KeyValues
    angles: Mapping[RotaryEmbedding, Angles]
    layer_inputs: tuple[Tensor, ...] = ()
