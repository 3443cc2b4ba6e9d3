"""From a checkpoint to a decoder: checks every tensor, makes layers of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.ops import AttentionScores
from graftlm.kernels.registry import REFERENCE
from graftlm.layers.attention import Attention, BorrowingAttention, SelfAttention
from graftlm.layers.block import (
    Block,
    LayerInputBlock,
    ParallelBlock,
    PostNormBlock,
    ScaledBlock,
    SequentialBlock,
)
from graftlm.layers.collective import Collective
from graftlm.layers.embedding import Embedding, InputEmbedding
from graftlm.layers.head import OutputHead
from graftlm.layers.kv_cache import KVShape
from graftlm.layers.layer_inputs import LayerInputs
from graftlm.layers.linear import Linear
from graftlm.layers.mlp import MLP, ClampedMLP, FeedForward, GatedMLP
from graftlm.layers.moe import (
    DenseBesideExperts,
    Expert,
    GatedSharedExpert,
    MixtureOfExperts,
    Router,
    RouterScale,
)
from graftlm.layers.norm import LayerNorm, Norm, RMSNorm
from graftlm.layers.patch import Slot
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.layers.row_parallel import RowParallelLinear
from graftlm.layers.vocabulary_parallel import VocabularyParallelWeight
from graftlm.models.cache_layout import cache_windows
from graftlm.models.decoder import Decoder, DecoderSpan, OutputLayers
from graftlm.models.divide import check_divisible
from graftlm.models.heap import trim_heap
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import HEAD_SLOT, LayerLayout, LinearLayout, ModuleLayout, NormLayout, lay_out
from graftlm.models.matrices import Matrices
from graftlm.models.quantized_cache import QuantizedCache
from graftlm.models.read import read_spec
from graftlm.models.rope import rotary_embedding
from graftlm.models.rope_spec import RopeSpec
from graftlm.models.site import SiteMap, map_sites
from graftlm.models.spec import AttentionSpec, ClampedSwiGLU, LayerSpec, MLPSpec, ModelSpec, MoESpec, NameMap, NormRole
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensor_share import MatrixShare, Part, share_model
from graftlm.models.tensors import NamedTensors, check_tensors, expected_shapes, has_tied_head
from graftlm.quantization import Weight
from graftlm.quantization.own_memory import with_own_memory
from graftlm.quantization.policy import LoadPolicy

logger = logging.getLogger(__name__)

SLOPE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    policy: LoadPolicy | None = None,
    cache: QuantizedCache | None = None,
    kernels: Kernels = REFERENCE,
) -> Decoder:
    """Read all weights of a checkpoint and assemble its decoder.

    Args:
        policy: how linear layers are held; default: as they are stored.
        cache: the checkpoint's own for this policy; filled and saved where it lacks something.
        kernels: those that will compute with the matrices; they say how these are laid out.

    Raises:
        ConfigurationError: the policy skips modules that are not there.
        CheckpointError: an unknown architecture, a config value that is not supported, or tensors that are missing,
            unknown or misshapen; the message lists them.
    """
    builder = _builder(checkpoint, dtype, device, policy, cache, kernels)
    decoder = builder.decoder()
    if cache is not None:
        cache.save()
    builder.report()
    return decoder


def build_span(
    checkpoint: Checkpoint,
    span: LayerSpan,
    *,
    dtype: torch.dtype,
    device: torch.device,
    policy: LoadPolicy | None = None,
    cache: QuantizedCache | None = None,
    kernels: Kernels = REFERENCE,
    collective: Collective | None = None,
) -> DecoderSpan:
    """Assemble some layers of a checkpoint's decoder. All tensors are checked, and no others' weights are read.

    Args:
        policy, kernels: as `build_decoder`. cache: the same, of these layers.
        collective: the ranks that share these layers out by tensors, if any do; built is this rank's share.

    Raises:
        CheckpointError: as `build_decoder`.
        ConfigurationError: the layers cannot be divided in this way.
    """
    builder = _builder(checkpoint, dtype, device, policy, cache, kernels, collective)
    decoder = builder.span(span)
    if cache is not None:
        cache.save()
    builder.report()
    return decoder


def _builder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    policy: LoadPolicy | None,
    cache: QuantizedCache | None,
    kernels: Kernels,
    collective: Collective | None = None,
) -> _Builder:
    family, spec = read_spec(checkpoint)
    tensors = NamedTensors(checkpoint, family.names)
    stored = StoredWeights(tensors)
    tied_head = has_tied_head(tensors, family.names, tied=spec.head.tied)
    spec = replace(spec, head=replace(spec.head, tied=tied_head))
    _check(tensors, stored, spec, family.names)
    policy = policy or LoadPolicy()
    modules = lay_out(spec, family.names).linear_modules()
    policy.check_skipped([family.names.embedding, *(module.path for module in modules)])
    matrices = Matrices(stored, policy, cache, dtype=dtype, device=device, kernels=kernels)
    return _Builder(tensors, matrices, spec, family.names, dtype, device, collective)


def _check(tensors: NamedTensors, stored: StoredWeights, spec: ModelSpec, names: NameMap) -> None:
    layout = lay_out(spec, names)
    modules = {module.path: module.tensor("weight") for module in layout.linear_modules()}
    modules[names.embedding] = f"{names.embedding}.weight"
    quantized = [path for path in modules if stored.is_quantized(path)]
    matrices = {modules[path] for path in quantized}
    shapes = expected_shapes(layout, tied_head=spec.head.tied)
    check_tensors(
        tensors,
        {name: shape for name, shape in shapes.items() if name not in matrices},
        names,
        claimed=frozenset().union(*(stored.tensor_names(path) for path in quantized)),
    )
    if stored.has_format and not quantized:
        logger.warning("the checkpoint has a quantization_config, but no module of it is quantised")


class _Layers(TypedDict):
    """What a decoder and a span of one have in common."""

    rotary: tuple[RotaryEmbedding, ...]
    blocks: tuple[Block, ...]
    linears: Mapping[Slot, Linear]
    norms: Mapping[Slot, Norm]
    shares: Mapping[Slot, MatrixShare]
    kv_shapes: tuple[KVShape, ...]
    shared_kv_layers: frozenset[int]
    windows: tuple[int | None, ...]
    sites: SiteMap
    dtype: torch.dtype
    device: torch.device


class _Builder:
    """Reads tensors and makes layers of them. Equal rotary specs share one embedding, equal windows one cache group."""

    def __init__(
        self,
        tensors: NamedTensors,
        matrices: Matrices,
        spec: ModelSpec,
        names: NameMap,
        dtype: torch.dtype,
        device: torch.device,
        collective: Collective | None,
    ) -> None:
        self._tensors = tensors
        self._matrices = matrices
        self._spec = spec
        self._names = names
        self._dtype = dtype
        self._device = device
        self._layout = lay_out(spec, names)
        self._collective = collective
        self._share = None
        if collective is not None:
            self._share = share_model(spec, self._layout, rank=collective.rank, size=collective.size)
        self._linears: dict[Slot, Linear] = {}
        self._norms: dict[Slot, Norm] = {}
        self._shares: dict[Slot, MatrixShare] = {}
        self._rotary: dict[RopeSpec, RotaryEmbedding] = {}
        self._windows = cache_windows(spec)
        self._kv_shapes: list[KVShape] = []
        # Of each layer so far, which of the shapes its keys and values have.
        self._cache_layers: list[int] = []
        self._shared_kv_layers: set[int] = set()

    def decoder(self) -> Decoder:
        spec, layout = self._spec, self._layout
        table = self._table()
        # Before the layers: while it is copied, the largest matrix of many models counts twice.
        head_weight = table if spec.head.tied else self._matrices.head(layout.head)
        embedding = self._embedding(table)
        whole = LayerSpan(start=0, stop=len(spec.layers), num_layers=len(spec.layers))
        layer_inputs = self._layer_inputs(whole)
        blocks = self._blocks(whole)
        return Decoder(
            first_layer=0,
            embedding=embedding,
            layer_inputs=layer_inputs,
            output=self._output(head_weight),
            kv_start=0,
            length_regimes=spec.length_regimes,
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            **self._layers(blocks),
        )

    def span(self, span: LayerSpan) -> DecoderSpan:
        """Its layers; a table that both ends use is in the first span and in the last."""
        check_divisible(self._spec, span)
        spec, layout = self._spec, self._layout
        table = self._table() if span.is_first or (span.is_last and spec.head.tied) else None
        head_weight = None
        if span.is_last:
            head_weight = table if spec.head.tied else self._whole(self._matrices.head(layout.head, self._head_share))
        embedding = None if table is None or not span.is_first else self._embedding(table)
        layer_inputs = self._layer_inputs(span)
        blocks = self._blocks(span)
        return DecoderSpan(
            first_layer=span.start,
            embedding=embedding,
            layer_inputs=layer_inputs,
            output=None if head_weight is None else self._output(head_weight),
            kv_start=sum(layer.attention.kv_layer is None for layer in spec.layers[: span.start]),
            **self._layers(blocks),
        )

    def _blocks(self, span: LayerSpan) -> list[Block]:
        specs = self._spec.layers if self._share is None else self._share.layers
        layers = list(zip(specs, self._layout.layers, strict=True))
        # Nothing here reads keys and values of layers before the span.
        self._cache_layers = [-1] * span.start
        return [self._next_block(index, *layers[index]) for index in range(span.start, span.stop)]

    def _next_block(self, index: int, spec: LayerSpec, layout: LayerLayout) -> Block:
        block = self._whole_block(index, spec, layout)
        # What was freed on the way can otherwise add up to a fifth of the weights (benchmarks/load.py, int8).
        trim_heap()
        return block

    def report(self) -> None:
        """Log what was quantised."""
        if self._matrices.quantized.num_modules:
            logger.info("%s", self._matrices.quantized)

    def _layers(self, blocks: Sequence[Block]) -> _Layers:
        return _Layers(
            rotary=tuple(self._rotary.values()),
            blocks=tuple(blocks),
            linears=self._linears,
            norms=self._norms,
            shares=self._shares,
            kv_shapes=tuple(self._kv_shapes),
            shared_kv_layers=frozenset(self._shared_kv_layers),
            windows=self._windows,
            sites=map_sites(self._spec, self._names),
            dtype=self._dtype,
            device=self._device,
        )

    def _table(self) -> Weight:
        path = self._names.embedding
        head = self._layout.head if self._spec.head.tied else None
        return self._whole(self._matrices.table(path, self._layout.tables[path], head=head, share=self._head_share))

    @property
    def _head_share(self) -> MatrixShare | None:
        """Of the token table too."""
        return None if self._share is None else self._share.matrices[HEAD_SLOT]

    def _whole(self, own: Weight) -> Weight:
        """A matrix of which the ranks have some rows each."""
        if self._share is None or self._collective is None:
            return own
        bounds = tuple((part.start, part.stop) for part in self._share.vocabulary)
        return VocabularyParallelWeight(own, bounds, self._collective)

    def _output(self, head_weight: Weight) -> OutputLayers:
        layout = self._layout
        return OutputLayers(
            final_norm=None if layout.final_norm is None else self._norm(layout.final_norm),
            project_out=None if layout.project_out is None else self._linear(layout.project_out),
            head=OutputHead(head_weight, self._bias(layout.head), self._spec.head.softcap),
        )

    def _embedding(self, table: Weight) -> InputEmbedding:
        spec, layout = self._spec.embedding, self._layout
        positions = None
        if spec.num_positions is not None:
            positions = self._read(f"{self._names.position_embedding}.weight")
        return InputEmbedding(
            Embedding(table, spec.scale),
            project_in=None if layout.project_in is None else self._linear(layout.project_in),
            positions=positions,
            position_offset=spec.position_offset,
            norm=None if layout.embedding_norm is None else self._norm(layout.embedding_norm),
        )

    def _layer_inputs(self, span: LayerSpan) -> LayerInputs | None:
        """Those of a span's layers: its part of the table and of the projection."""
        spec, names, layout = self._spec.layer_inputs, self._names.layer_inputs, self._layout
        if spec is None or names is None or layout.layer_input_projection is None or layout.layer_input_norm is None:
            return None
        columns = rows = None
        if not span.is_whole:
            own = Part(start=span.start * spec.size, stop=span.stop * spec.size)
            columns, rows = MatrixShare(columns=own), MatrixShare(rows=(own,))
            self._shares[layout.layer_input_projection.slot] = rows
        table = self._matrices.table(names.table, layout.tables[names.table], head=None, share=columns)
        if self._share is not None and self._collective is not None:
            tokens = self._share.vocabulary[self._collective.rank]
            table = self._whole(with_own_memory(table.part(tokens.start, tokens.stop)))
        projection = self._matrices.linear(layout.layer_input_projection, rows)
        return LayerInputs(
            table=Embedding(table, spec.size**0.5),
            projection=self._add(layout.layer_input_projection, projection),
            norm=self._norm(layout.layer_input_norm),
            first_layer=span.start,
            num_layers=span.stop - span.start,
        )

    def _whole_block(self, index: int, spec: LayerSpec, layout: LayerLayout) -> Block:
        block = self._block(index, spec, layout)
        if self._spec.layer_inputs is not None:
            block = LayerInputBlock(
                block=block,
                index=index,
                gate=self._linear(layout.linears["layer_input_gate"]),
                activation=self._spec.layer_inputs.activation,
                up=self._linear(layout.linears["layer_input_up"]),
                norm=self._norm(layout.norms["post_layer_input"]),
            )
        if spec.scaled:
            block = ScaledBlock(block=block, scalar=self._read(layout.parameters["layer_scalar"].name))
        return block

    def _block(self, index: int, spec: LayerSpec, layout: LayerLayout) -> Block:
        norms: dict[NormRole, Norm] = {
            role: self._norm(norm) for role, norm in layout.norms.items() if role != "post_layer_input"
        }
        attention = self._attention(index, spec.attention, layout, norms)
        mlp = self._feed_forward(index, spec, layout, norms)
        if spec.wiring == "parallel":
            return ParallelBlock(
                attention=attention,
                mlp=mlp,
                pre_attention_norm=norms["pre_attention"],
                pre_mlp_norm=norms.get("pre_mlp"),
            )
        if spec.wiring == "post_norm":
            return PostNormBlock(
                attention=attention,
                mlp=mlp,
                post_attention_norm=norms["post_attention"],
                post_mlp_norm=norms["post_mlp"],
            )
        return SequentialBlock(
            attention=attention,
            mlp=mlp,
            pre_attention_norm=norms.get("pre_attention"),
            post_attention_norm=norms.get("post_attention"),
            pre_mlp_norm=norms.get("pre_mlp"),
            post_mlp_norm=norms.get("post_mlp"),
            residual_after_norm=spec.wiring == "sequential_normed_residual",
        )

    def _attention(
        self, index: int, spec: AttentionSpec, layout: LayerLayout, norms: Mapping[NormRole, Norm]
    ) -> SelfAttention:
        cache_layer = self._cache_layer(spec)
        group = self._kv_shapes[cache_layer].group
        scores = AttentionScores(scale=spec.scale, softcap=spec.softcap)
        if spec.alibi is not None:
            slopes = torch.tensor(spec.alibi.slopes, dtype=SLOPE_DTYPES[spec.alibi.dtype], device=self._device)
            scores = replace(scores, slopes=slopes, slope_factor=spec.alibi.factor)
        if spec.sinks:
            scores = replace(scores, sinks=self._sinks(index, layout))
        rotary = None if spec.rope is None else self._rotary_embedding(spec.rope)
        if spec.kv_layer is not None:
            return BorrowingAttention(
                query=self._linear(layout.linears["qkv"]),
                output=self._linear(layout.linears["output"]),
                num_heads=spec.num_heads,
                scores=scores,
                rotary=rotary,
                query_norm=norms.get("query"),
                cache_layer=cache_layer,
                cache_group=group,
            )
        return Attention(
            qkv=self._linear(layout.linears["qkv"]),
            output=self._linear(layout.linears["output"]),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_order=spec.head_order,
            scores=scores,
            rotary=rotary,
            query_norm=norms.get("query"),
            key_norm=norms.get("key"),
            value_norm=norms.get("value"),
            cache_layer=cache_layer,
            cache_group=group,
        )

    def _sinks(self, index: int, layout: LayerLayout) -> Tensor:
        """One for each head."""
        sinks = self._read(layout.parameters["sinks"].name)
        if self._share is None:
            return sinks
        own = self._share.heads[index].queries
        return sinks[own.start : own.stop].clone()

    def _cache_layer(self, spec: AttentionSpec) -> int:
        """Where the keys and values that a layer reads are."""
        if spec.kv_layer is not None:
            self._cache_layers.append(self._cache_layers[spec.kv_layer])
            self._shared_kv_layers.add(self._cache_layers[-1])
            return self._cache_layers[-1]
        group = self._windows.index(spec.window)
        self._kv_shapes.append(KVShape(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, group=group))
        self._cache_layers.append(len(self._kv_shapes) - 1)
        return self._cache_layers[-1]

    def _feed_forward(
        self, index: int, spec: LayerSpec, layout: LayerLayout, norms: Mapping[NormRole, Norm]
    ) -> FeedForward:
        if isinstance(spec.mlp, MoESpec):
            return self._experts(index, spec.mlp, layout, norms)
        mlp = self._mlp(spec.mlp, layout)
        if spec.experts is None:
            return mlp
        return DenseBesideExperts(
            dense=mlp,
            experts=self._experts(index, spec.experts, layout, norms),
            pre_dense_norm=norms.get("pre_dense"),
            post_dense_norm=norms.get("post_dense"),
            post_experts_norm=norms.get("post_experts"),
        )

    def _mlp(self, spec: MLPSpec, layout: LayerLayout) -> FeedForward:
        if spec.gated or isinstance(spec.activation, ClampedSwiGLU):
            return self._gated_mlp(spec, layout.linears["gate_up"], layout.linears["down"])
        down = self._linear(layout.linears["down"])
        return MLP(up=self._linear(layout.linears["up"]), down=down, activation=spec.activation)

    def _gated_mlp(self, spec: MLPSpec, gate_up_layout: LinearLayout, down_layout: LinearLayout) -> FeedForward:
        gate_up, down = self._linear(gate_up_layout), self._linear(down_layout)
        if isinstance(spec.activation, ClampedSwiGLU):
            alpha, limit = spec.activation.alpha, spec.activation.limit
            return ClampedMLP(gate_up=gate_up, down=down, alpha=alpha, limit=limit)
        return GatedMLP(gate_up=gate_up, down=down, activation=spec.activation)

    def _experts(self, index: int, spec: MoESpec, layout: LayerLayout, norms: Mapping[NormRole, Norm]) -> FeedForward:
        own = None if self._share is None else self._share.experts[index]
        shared = None
        if spec.shared is not None:
            mlp = self._gated_mlp(spec.shared, layout.linears["shared_gate_up"], layout.linears["shared_down"])
            shared = GatedSharedExpert(gate=self._linear(layout.linears["shared_expert_gate"]), mlp=mlp)
        return MixtureOfExperts(
            router=self._router(spec, layout, norms),
            norm=norms.get("pre_experts"),
            experts={
                number: Expert(
                    mlp=self._gated_mlp(spec.expert, expert["gate_up"], expert["down"]),
                    slots=tuple(linear.slot for linear in expert.values()),
                )
                for number, expert in enumerate(layout.experts)
                if own is None or own.start <= number < own.stop
            },
            shared=shared,
            collective=self._collective,
        )

    def _router(self, spec: MoESpec, layout: LayerLayout, norms: Mapping[NormRole, Norm]) -> Router:
        scale = expert_scale = None
        if spec.router_factor is not None:
            vector = self._read(layout.parameters["router_scale"].name)
            scale = RouterScale(vector=vector, factor=spec.router_factor)
        if spec.expert_scaled:
            expert_scale = self._read(layout.parameters["expert_scale"].name)
        linear = layout.linears["router"]
        return Router(
            linear=self._add(linear, self._matrices.router(linear)),
            experts_per_token=spec.experts_per_token,
            renormalise=spec.renormalise,
            norm=norms.get("router"),
            scale=scale,
            expert_scale=expert_scale,
        )

    def _rotary_embedding(self, spec: RopeSpec) -> RotaryEmbedding:
        if spec not in self._rotary:
            self._rotary[spec] = rotary_embedding(spec, self._device)
        return self._rotary[spec]

    def _linear(self, layout: LinearLayout) -> Linear:
        share = None if self._share is None else self._share.matrices.get(layout.slot)
        return self._add(layout, self._matrices.linear(layout, share), share)

    def _add(self, layout: LinearLayout, weight: Weight, share: MatrixShare | None = None) -> Linear:
        bias = self._bias(layout)
        if share is None or self._collective is None:
            linear = Linear(layout.slot, weight, bias)
        elif share.columns is not None:
            linear = RowParallelLinear(layout.slot, weight, bias, self._collective)
        else:
            if bias is not None:
                bias = torch.cat([bias[part.start : part.stop] for part in share.rows])
            linear = Linear(layout.slot, weight, bias)
        self._linears[layout.slot] = linear
        return linear

    def _norm(self, layout: NormLayout) -> Norm:
        weight = self._read(f"{layout.path}.weight") if layout.spec.weight else None
        norm: Norm
        if layout.spec.kind == "layer":
            bias = self._read(f"{layout.path}.bias") if layout.spec.bias else None
            norm = LayerNorm(layout.slot, weight, bias, layout.spec.eps)
        else:
            norm = RMSNorm(
                layout.slot,
                weight,
                layout.spec.eps,
                offset=layout.spec.offset,
                float32_product=layout.spec.float32_product,
            )
        self._norms[layout.slot] = norm
        return norm

    def _bias(self, layout: LinearLayout) -> Tensor | None:
        """The modules' biases one after the other."""
        if not layout.bias:
            return None
        biases = [self._stored_bias(module) for module in layout.modules]
        return torch.cat([bias.to(device=self._device, dtype=self._dtype) for bias in biases])

    def _stored_bias(self, module: ModuleLayout) -> Tensor:
        stored = self._tensors.read(module.tensor("bias"))
        return stored if module.stack is None else stored[module.stack.index]

    def _read(self, name: str) -> Tensor:
        """A copy: a file that is later truncated cannot hurt."""
        stored = self._tensors.read(name)
        return torch.empty(stored.shape, dtype=self._dtype, device=self._device).copy_(stored)
