"""The only decoder. It is assembled from layers by `build.py`; it knows no family and no adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.block import Block, BlockRunner, run_block
from graftlm.layers.embedding import InputEmbedding
from graftlm.layers.head import OutputHead
from graftlm.layers.key_values import KeyValues
from graftlm.layers.kv_cache import KVShape
from graftlm.layers.layer_inputs import LayerInputs
from graftlm.layers.linear import Linear
from graftlm.layers.norm import Norm
from graftlm.layers.patch import Segment, Slot
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.layers.step import DecoderStep
from graftlm.models.length_regimes import LengthRegimes
from graftlm.models.site import SiteMap


class Decoder:
    """Token ids to logits, over ragged batches.

    linears, norms: the layers by the slot adapters know them under. sites: where adapters can attach.
    kv_shapes: what each layer of the cache holds. windows: how far back each cache group sees; None for all the way.
    length_regimes: lengths that change how a sequence is computed.
    """

    def __init__(
        self,
        *,
        embedding: InputEmbedding,
        rotary: Sequence[RotaryEmbedding],
        layer_inputs: LayerInputs | None,
        blocks: Sequence[Block],
        final_norm: Norm | None,
        project_out: Linear | None,
        head: OutputHead,
        linears: Mapping[Slot, Linear],
        norms: Mapping[Slot, Norm],
        kv_shapes: Sequence[KVShape],
        windows: Sequence[int | None],
        length_regimes: LengthRegimes,
        sites: SiteMap,
        vocab_size: int,
        max_position_embeddings: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.embedding = embedding
        self._rotary = tuple(rotary)
        self._layer_inputs = layer_inputs
        self._blocks = tuple(blocks)
        self._final_norm = final_norm
        self._project_out = project_out
        self.head = head
        self.linears = linears
        self.norms = norms
        self.kv_shapes = tuple(kv_shapes)
        self.windows = tuple(windows)
        self.length_regimes = length_regimes
        self.sites = sites
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.dtype = dtype
        self.device = device

    def __call__(self, batch: RaggedBatch, key_values: KeyValues) -> Tensor:
        """Logits of the rows that want them, [N, V] float32, V the largest vocabulary among them."""
        hidden = self.hidden(batch, key_values)
        return self.logits(hidden.index_select(0, batch.logit_rows), batch.logit_segments)

    def hidden(self, batch: RaggedBatch, key_values: KeyValues, run: BlockRunner = run_block) -> Tensor:
        """What the last layer gives, [T, E]. run: how each layer is computed."""
        hidden = self.embedding(batch)
        angles = {rotary: rotary.angles(batch, hidden.dtype) for rotary in self._rotary}
        layer_inputs = () if self._layer_inputs is None else self._layer_inputs(batch, hidden)
        step = DecoderStep(batch=batch, key_values=key_values, angles=angles, layer_inputs=layer_inputs)
        for block in self._blocks:
            hidden = run(block, hidden, step)
        return hidden

    def logits(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Of rows of the last layer's output, [N, E] -> [N, V] float32."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden, segments)
        if self._project_out is not None:
            hidden = self._project_out(hidden, segments)
        return self.head(hidden, segments)
