"""The only decoder, whole or in spans. It is assembled from layers by `build.py`; it knows no family and no adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.block import Block, BlocksRunner, run_blocks
from graftlm.layers.embedding import InputEmbedding
from graftlm.layers.head import OutputHead
from graftlm.layers.key_values import KeyValues
from graftlm.layers.kv_cache import KVShape
from graftlm.layers.layer_inputs import LayerInputs
from graftlm.layers.linear import Linear
from graftlm.layers.norm import Norm
from graftlm.layers.patch import Slot
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.layers.segments import Segments
from graftlm.layers.step import DecoderStep
from graftlm.models.length_regimes import LengthRegimes
from graftlm.models.site import SiteMap
from graftlm.models.tensor_share import MatrixShare


@dataclass(frozen=True, kw_only=True)
class OutputLayers:
    """What turns the last layer's output into logits."""

    final_norm: Norm | None
    project_out: Linear | None
    head: OutputHead

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """[N, E] -> [N, V]."""
        if self.final_norm is not None:
            hidden = self.final_norm(hidden, segments)
        if self.project_out is not None:
            hidden = self.project_out(hidden, segments)
        return self.head(hidden, segments)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderSpan:
    """Consecutive layers of a decoder, over ragged batches.

    first_layer: its first block's index in the decoder.
    embedding: of the span that begins with the first layer. output: of the span that ends with the last.
    layer_inputs: of its own layers, where layers have inputs of their own. They are made of the embedded tokens, which
        then go from span to span beside the hidden state.
    linears, norms: its layers by the slot adapters know them under. sites: where adapters can attach, in all spans.
    shares: which rows it has of linear layers that are divided among the spans.
    kv_shapes: what each of its layers of the cache holds. kv_start: how many layers the spans before have there.
    shared_kv_layers: those of them that several layers read.
    windows: how far back each cache group of the whole decoder sees; None for all the way.
    """

    first_layer: int
    embedding: InputEmbedding | None
    rotary: tuple[RotaryEmbedding, ...]
    layer_inputs: LayerInputs | None
    blocks: tuple[Block, ...]
    output: OutputLayers | None
    linears: Mapping[Slot, Linear]
    norms: Mapping[Slot, Norm]
    shares: Mapping[Slot, MatrixShare]
    kv_start: int
    kv_shapes: tuple[KVShape, ...]
    shared_kv_layers: frozenset[int]
    windows: tuple[int | None, ...]
    sites: SiteMap
    dtype: torch.dtype
    device: torch.device

    def __call__(
        self,
        batch: RaggedBatch,
        key_values: KeyValues,
        hidden: Tensor | None = None,
        run: BlocksRunner = run_blocks,
    ) -> Tensor:
        """Compute a batch.

        Args:
            hidden: what the span before gives; the first span needs none, unless the batch comes back to it.
            run: how its layers are computed.

        Returns: what the last layer gives, [T, E], or with layer inputs, beside the embedded tokens, [T, 2E]; of the
            last span, with the last of the batch's layers, the logits of the rows that want them, [N, V], V the largest
            vocabulary among them. All are in the model's dtype.
        """
        hidden, embedded = self._enter(batch, hidden)
        hidden = self._run(batch, key_values, hidden, embedded, run)
        if self.output is not None and batch.reaches_end:
            return self.output(hidden.index_select(0, batch.logit_rows), batch.logit_segments)
        return hidden if self.layer_inputs is None else torch.cat([hidden, embedded], dim=1)

    def _enter(self, batch: RaggedBatch, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """What its first layer sees, and the embedded tokens, where they are needed. before: of the span before."""
        if before is None:
            if self.embedding is None:
                raise ValueError("without an embedding it takes the output of the span before")
            embedded = self.embedding(batch)
            return embedded, embedded
        if self.layer_inputs is None:
            return before, before
        hidden, embedded = before.chunk(2, dim=1)
        return hidden.contiguous(), embedded.contiguous()

    def _run(
        self, batch: RaggedBatch, key_values: KeyValues, hidden: Tensor, embedded: Tensor, run: BlocksRunner
    ) -> Tensor:
        angles = {rotary: rotary.angles(batch, hidden.dtype) for rotary in self.rotary}
        layer_inputs = {} if self.layer_inputs is None else self.layer_inputs(batch, embedded)
        step = DecoderStep(batch=batch, key_values=key_values, angles=angles, layer_inputs=layer_inputs)
        if batch.layers is None:
            return run(self.blocks, hidden, step)
        for place, depth in enumerate(self._own_depths(batch.layers)):
            if batch.depths is None or depth in batch.depths:
                block = self.blocks[batch.layers[depth] - self.first_layer]
                hidden = run((block,), hidden, step.at_depth(depth, place=place, num_layers=len(self.blocks)))
        return hidden

    def was_passed(self, batch: RaggedBatch) -> bool:
        """Whether some of its layers were computed for the batch before it came back now."""
        if batch.layers is None or batch.depths is None:
            return False
        return any(depth < batch.depths.start for depth in self._own_depths(batch.layers))

    def _own_depths(self, layers: Sequence[int]) -> list[int]:
        own = range(self.first_layer, self.first_layer + len(self.blocks))
        return [depth for depth, layer in enumerate(layers) if layer in own]


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoder(DecoderSpan):
    """Token ids to logits: all layers, between both ends. length_regimes: lengths that change how a sequence is
    computed."""

    embedding: InputEmbedding
    output: OutputLayers
    length_regimes: LengthRegimes
    vocab_size: int
    max_position_embeddings: int

    @property
    def head(self) -> OutputHead:
        return self.output.head

    def hidden(self, batch: RaggedBatch, key_values: KeyValues, run: BlocksRunner = run_blocks) -> Tensor:
        """What the last layer gives, [T, E]. run: how its layers are computed."""
        hidden, embedded = self._enter(batch, None)
        return self._run(batch, key_values, hidden, embedded, run)

    def logits(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Of rows of the last layer's output, [N, E] -> [N, V] float32 (float64 stays)."""
        return ops.widened(self.output(hidden, segments))
