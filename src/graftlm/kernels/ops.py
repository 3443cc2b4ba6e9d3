"""The operations the layers call. One back-end exists today, the reference in plain torch; a second one brings the
registry that chooses between them. Knows tensors and shapes; knows nothing of models, adapters or requests."""

from graftlm.kernels.reference.activation import Activation, activate, clamped_swiglu, gated_activation
from graftlm.kernels.reference.attention import AttentionPlan, paged_attention, plan_attention
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.kv_write import write_kv
from graftlm.kernels.reference.lora import LoraExpand, LoraSegment, LoraUpdate, lora
from graftlm.kernels.reference.norm import layer_norm, rms_norm
from graftlm.kernels.reference.packed_attention import PackedAttentionPlan, packed_attention, plan_packed_attention
from graftlm.kernels.reference.precision import widened
from graftlm.kernels.reference.rotary import apply_rotary
from graftlm.kernels.reference.routing import route

__all__ = [
    "Activation",
    "AttentionPlan",
    "AttentionScores",
    "LoraExpand",
    "LoraSegment",
    "LoraUpdate",
    "PackedAttentionPlan",
    "activate",
    "apply_rotary",
    "clamped_swiglu",
    "gated_activation",
    "layer_norm",
    "lora",
    "packed_attention",
    "paged_attention",
    "plan_attention",
    "plan_packed_attention",
    "rms_norm",
    "route",
    "widened",
    "write_kv",
]
