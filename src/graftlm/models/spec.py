"""What a model is, as data: the decoder is built from a spec and asks nothing else. No torch, no family names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LayerRole = Literal["pre_attention_norm", "q", "k", "v", "output", "pre_mlp_norm", "gate", "up", "down"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary frequencies: theta over `dims` dimensions, scaled by one of the known rules.

    kind: "default"; "linear" divides all frequencies by `factor`; "llama3" stretches the low ones (Llama 3.1's rule);
    "frequency_factors" divides each by its own factor (as GGUF stores Llama 3's).
    """

    theta: float
    dims: int
    kind: Literal["default", "linear", "llama3", "frequency_factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MLPSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. tied_head: the output head is the embedding table."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    tied_head: bool


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """Module paths of a family as transformers names them: what tensors are called on disk and what PEFT targets.

    layer: role -> path with {} for the layer index.
    default_targets: what PEFT adapts when an adapter names no target (peft/utils/constants.py). ia3_targets,
        ia3_feedforward, ln_tuning_targets: the same for IA3 and LN tuning; empty where PEFT has no default.
    ignored_tensors: regular expressions of tensors that old checkpoints carry and nobody needs.
    """

    embedding: str
    final_norm: str
    head: str
    layer: Mapping[LayerRole, str]
    default_targets: tuple[str, ...]
    ia3_targets: tuple[str, ...] = ()
    ia3_feedforward: tuple[str, ...] = ()
    ln_tuning_targets: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
