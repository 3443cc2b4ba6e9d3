"""What a model is, as data: the decoder is built from a spec and asks nothing else. No torch, no family names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graftlm.errors import CheckpointError
from graftlm.models.length_regimes import LengthRegimes
from graftlm.models.rope_spec import RopeSpec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# Linear layers of a decoder layer; "qkv" and "gate_up" may hold several modules of the checkpoint, stacked.
LinearRole = Literal[
    "qkv",
    "output",
    "gate_up",
    "up",
    "down",
    "router",
    "shared_gate_up",
    "shared_down",
    "shared_expert_gate",
    "layer_input_gate",
    "layer_input_up",
]
# Those of one expert.
ExpertRole = Literal["gate_up", "down"]
# Tensors of a decoder layer that are no module's weight or bias.
ParameterRole = Literal["sinks", "layer_scalar", "router_scale", "expert_scale"]
NormRole = Literal[
    "pre_attention",
    "post_attention",
    "pre_mlp",
    "post_mlp",
    "query",
    "key",
    "value",
    "post_layer_input",
    "router",
    "pre_dense",
    "post_dense",
    "pre_experts",
    "post_experts",
]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the last dimension.

    size: its width; None for the hidden size.
    weight, bias: whether it has them; only a layer norm has a bias.
    offset: what the stored weight lacks of the one that is used (Gemma: 1).
    float32_product: the weight is applied before the result is rounded to the model's dtype.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    size: int | None = None
    weight: bool = True
    bias: bool = False
    offset: float = 0.0
    float32_product: bool = False


@dataclass(frozen=True, kw_only=True)
class AlibiSpec:
    """Positions as a bias on the scores: slope times the key's position, times `factor`.

    slopes: one per head. dtype: what slopes, positions and their products are rounded to.
    """

    slopes: tuple[float, ...]
    factor: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Self-attention of one layer.

    head_order: how the fused projection's columns are shared out, as in `layers.attention.HeadOrder`.
    rope: None for no rotary positions. alibi: None for no bias by position.
    window: a token sees this many tokens, itself included; None for all. softcap: c * tanh(score / c).
    sinks: each head has one more score, learned, that takes part in the softmax and has no value.
    kv_layer: the earlier layer whose keys and values it reads; it has queries alone then. None for its own.

    Raises:
        CheckpointError: the numbers of heads do not fit each other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    head_order: Literal["concatenated", "grouped", "keys_as_values"] = "concatenated"
    rope: RopeSpec | None = None
    alibi: AlibiSpec | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_layer: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "config.json: the number of attention heads is not a multiple of the number of key-value heads",
                got=f"{self.num_heads}, {self.num_kv_heads}",
            )
        if self.rope is not None and (self.rope.dims % 2 or not 0 < self.rope.dims <= self.head_dim):
            raise CheckpointError(
                "config.json: rotary positions need an even number of dimensions, at most those of a head",
                got=f"{self.rope.dims} of {self.head_dim}",
            )


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """The gated activation of GPT-OSS, whose gate and up columns alternate; as in `kernels.ops.clamped_swiglu`."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A feed-forward layer, gated (gate * up, then down) or plain. A clamped activation is always gated."""

    intermediate_size: int
    activation: Activation | ClampedSwiGLU
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: each token goes to the `experts_per_token` that its router finds most probable.

    expert: each of them. renormalise: the chosen probabilities are made to sum to one.
    router_factor: what the router reads is multiplied by a vector of its own, then by this number; None for neither.
    expert_scaled: each expert's probability, once chosen, is multiplied by a number of its own.
    shared: one more expert for every token, weighted by the sigmoid of its own gate.

    Raises:
        CheckpointError: a token would go to more experts than there are.
    """

    num_experts: int
    experts_per_token: int
    renormalise: bool
    expert: MLPSpec
    router_bias: bool = False
    router_factor: float | None = None
    expert_scaled: bool = False
    shared: MLPSpec | None = None

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise CheckpointError(
                "config.json: num_experts_per_tok or top_k_experts is larger than the number of experts",
                got=f"{self.experts_per_token} of {self.num_experts}",
            )


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer.

    mlp: the feed-forward layer. experts: a mixture beside a dense one; both read the same, and their outputs are added.
    norms: those it has. "query" and "key" are over heads or whole projections, by their size; "value" over heads.
        "router" is of what a router reads, "pre_experts" of what its experts do. Where experts are beside a dense layer
        "pre_dense", "post_dense" and "post_experts" belong to one of the two, "pre_mlp" and "post_mlp" to both.
    wiring: "sequential": attention, then feed-forward, each with a norm before or after the branch or both;
        "sequential_normed_residual": the same, but the branch is added to its normed input; "parallel": both read the
        layer's input, under one norm or two; "post_norm": the sum of branch and residual is normed.
    scaled: its output is multiplied by a number of its own.
    """

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    norms: Mapping[NormRole, NormSpec]
    experts: MoESpec | None = None
    wiring: Literal["sequential", "sequential_normed_residual", "parallel", "post_norm"] = "sequential"
    scaled: bool = False

    @property
    def mixture(self) -> MoESpec | None:
        """The experts, alone or beside a dense layer."""
        return self.mlp if isinstance(self.mlp, MoESpec) else self.experts


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The model's input.

    size: width of the token table, if it is not the hidden size; the input is then projected up, and the head's input
        down. scale: factor of the token rows, rounded to the model's dtype.
    num_positions: rows of a learned position table; None for none. position_offset: the row of position 0.
    """

    size: int | None = None
    scale: float | None = None
    num_positions: int | None = None
    position_offset: int = 0
    norm: NormSpec | None = None


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """What every layer is told about each token besides its hidden state: `size` numbers for each layer, from a table
    of tokens and from the embedded token; as in `layers.layer_inputs`.

    norm: of the part made of the embedded token. activation: of the gate in each layer.
    """

    size: int
    norm: NormSpec
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The output head. tied: it is the token table. softcap: c * tanh(logit / c)."""

    tied: bool
    bias: bool = False
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    embedding: EmbeddingSpec = field(default_factory=EmbeddingSpec)
    layer_inputs: LayerInputSpec | None = None

    @property
    def length_regimes(self) -> LengthRegimes:
        """Lengths that change how a sequence is computed."""
        ropes = [layer.attention.rope for layer in self.layers if layer.attention.rope is not None]
        return LengthRegimes.union(rope.length_regimes for rope in ropes)

    @property
    def embedding_size(self) -> int:
        """Width of a row of the token table, and of the output head."""
        return self.embedding.size or self.hidden_size


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What the experts of a layer are called.

    parameters: role -> the parameter that stacks all experts' matrices in memory, with {} for the layer index, in the
        order in which its module registers them. PEFT reaches it with `target_parameters`.
    modules: role -> the linear modules of one expert that files keep apart, with {} for the layer's and the expert's
        index; several are stacked in this order. Empty when files hold the parameters as they are. Adapters from before
        transformers 5 name these modules.
    transposed: the parameters are [experts, in, out], not [experts, out, in].
    linear_router: the module that chooses them is a linear one to PEFT too, which usually sees a parameter in it.
    """

    parameters: Mapping[ExpertRole, str]
    modules: Mapping[ExpertRole, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    linear_router: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerInputNames:
    """Modules that make the inputs of all layers: the table of tokens, the projection of embedded tokens, its norm."""

    table: str
    projection: str
    norm: str


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Module paths of a family as transformers names them in memory: what PEFT targets, and what the tensors on disk
    are called unless `renames` says otherwise.

    linears: role -> paths with {} for the layer index; several are stacked in this order, one may hold all of them. A
        layer with fewer projections (no values of its own, say) has the first of several.
    norms: the same for norms. parameters: the same for tensors that belong to no such module.
    experts: for families with a mixture of experts; the router is a linear module, though seldom to PEFT.
    conv1d: roles whose matrices are stored [in, out] (transformers' Conv1D).
    renames: (pattern, replacement), tried in order on each tensor's name on disk.
    ignored_tensors: regular expressions of tensors that old checkpoints carry and nobody needs.
    unused_modules: regular expressions of modules that no text passes through (a vision tower); what a checkpoint or
        an adapter holds for them or for modules inside them is left unread.
    default_targets: what PEFT adapts when an adapter names no target (peft/utils/constants.py). ia3_targets,
        ia3_feedforward, ln_tuning_targets: the same for IA3 and LN tuning; empty where PEFT has no default.
    """

    embedding: str
    head: str
    final_norm: str | None
    linears: Mapping[LinearRole, tuple[str, ...]]
    norms: Mapping[NormRole, str]
    position_embedding: str | None = None
    embedding_norm: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    parameters: Mapping[ParameterRole, str] = field(default_factory=dict)
    experts: ExpertNames | None = None
    layer_inputs: LayerInputNames | None = None
    conv1d: frozenset[LinearRole] = frozenset()
    renames: tuple[tuple[str, str], ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    unused_modules: tuple[str, ...] = ()
    default_targets: tuple[str, ...] = ()
    ia3_targets: tuple[str, ...] = ()
    ia3_feedforward: tuple[str, ...] = ()
    ln_tuning_targets: tuple[str, ...] = ()
