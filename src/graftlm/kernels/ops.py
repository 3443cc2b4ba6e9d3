"""The operations the layers call. Those with more than one implementation are functions here, which say what they mean
and call the one that `registry` has active. Knows tensors and shapes; knows nothing of models, adapters or requests."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from graftlm.kernels import registry
from graftlm.kernels.reference.activation import Activation, activate, clamped_swiglu, gated_activation
from graftlm.kernels.reference.attention import AttentionPlan, paged_attention, plan_attention
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.integer_product import MAX_INTEGER_COLUMNS, integer_matmul
from graftlm.kernels.reference.kv_write import write_kv
from graftlm.kernels.reference.lora import LoraExpand, LoraSegment, LoraUpdate
from graftlm.kernels.reference.norm import layer_norm, rms_norm
from graftlm.kernels.reference.packed_attention import PackedAttentionPlan, packed_attention, plan_packed_attention
from graftlm.kernels.reference.precision import widened
from graftlm.kernels.reference.rotary import apply_rotary
from graftlm.kernels.reference.routing import route

__all__ = [
    "MAX_INTEGER_COLUMNS",
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
    "grouped_matmul",
    "integer_matmul",
    "layer_norm",
    "linear",
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, rounded once to x's dtype.

    Args: x: [T, in]. weight: [out, in], bias: [out], both in x's dtype.
    Returns: [T, out].
    Source: torch.nn.functional.linear.
    """
    return registry.active().linear(x, weight, bias)


def grouped_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """Each group of columns times its own matrix: out[t, g] = x[t, g] @ matrices[g].

    Args: x: [T, G, in]. matrices: [G, in, out], or [1, in, out] for all groups, in x's dtype.
    Returns: [T, G, out].
    """
    return registry.active().grouped_matmul(x, matrices)


def lora(out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
    """Add each segment's low-rank update to its rows of `out`, in place. Differentiable.

    Semantics: for each segment s and expand e of its update:
        out[s.start:s.stop, e.out_start:e.out_stop] += (x[s.start:s.stop] @ shrink)[:, e.rank] @ e.matrix
    Rows outside the segments are untouched. The update is computed in its own dtype (float32) and rounded once,
    together with the base's result, to `out`'s dtype: what PEFT does for a single adapter.
    Args: x: [T, in]. out: [T, out]. segments: disjoint.
    Source: Punica, arXiv 2310.18547; rounding from peft/tuners/lora/layer.py.
    """
    registry.active().lora(out, x, segments)
