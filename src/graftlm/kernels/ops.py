"""The operations the layers call. Those with more than one implementation are functions here, which say what they mean
and call the one that `registry` has active. Knows tensors and shapes; knows nothing of models, adapters or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from graftlm.kernels import registry
from graftlm.kernels.kernel_set import AttentionPlan, LoraPlan
from graftlm.kernels.reference.activation import Activation
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.integer_product import MAX_INTEGER_COLUMNS, integer_matmul
from graftlm.kernels.reference.lora import AdapterRows, LoraExpand, LoraSegment, LoraUpdate, LoraUpdates
from graftlm.kernels.reference.packed_attention import PackedAttentionPlan, packed_attention, plan_packed_attention
from graftlm.kernels.reference.precision import widened
from graftlm.kernels.reference.routing import route
from graftlm.kernels.reference.sampling import TokenDraw, TokenLogprobs

__all__ = [
    "MAX_INTEGER_COLUMNS",
    "Activation",
    "AdapterRows",
    "AttentionPlan",
    "AttentionScores",
    "LoraExpand",
    "LoraPlan",
    "LoraSegment",
    "LoraUpdate",
    "LoraUpdates",
    "PackedAttentionPlan",
    "TokenDraw",
    "TokenLogprobs",
    "activate",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rotary",
    "clamped_swiglu",
    "draw_tokens",
    "elementwise",
    "gated_activation",
    "grouped_matmul",
    "integer_matmul",
    "join_columns",
    "layer_norm",
    "linear",
    "lora",
    "packed_attention",
    "paged_attention",
    "plan_attention",
    "plan_lora",
    "plan_packed_attention",
    "rms_norm",
    "rotate_and_write",
    "route",
    "token_logprobs",
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


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """A function of single elements, of which torch may compute some otherwise than others: exp, sigmoid, pow, …

    Args: function: of as many tensors as there are operands; it may change them. operands: one dtype; they broadcast.
    Returns: function(*operands).
    """
    return registry.active().elementwise(function, *operands)


def plan_lora(adapters: Sequence[AdapterRows], layers: Sequence[str] | None = None) -> LoraPlan:
    """Find out once for all layers how a batch's adapters change them.

    Args: adapters: of disjoint rows. layers: those that the plan will be asked about; None for all.
    """
    return registry.active().plan_lora(adapters, layers)


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


def add(branch: Tensor, residual: Tensor) -> Tensor:
    """branch + residual, rounded to their dtype.

    Args: branch, residual: of one shape and dtype. The branch's content is lost, unless one of them needs a gradient.
    """
    return registry.active().add(branch, residual)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Matrices of one dtype side by side. Args: parts: [T, n] each. Source: torch.cat."""
    return registry.active().join_columns(parts)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm.

    Semantics: x / sqrt(mean(x^2) + eps) in float32 (float64 stays), then times weight. The weight's dtype says where
    the result is rounded: a weight in x's dtype is applied after the cast to it (Llama), a float32 weight before
    (Gemma, OLMo-2).
    Args: x: [..., E]. weight: [E], x's dtype or float32; None for none.
    Returns: x's shape and dtype.
    Source: arXiv 1910.07467; transformers' LlamaRMSNorm and GemmaRMSNorm.
    """
    return registry.active().rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension.

    Semantics: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
    Args: x: [..., E]. weight, bias: [E], x's dtype; None for none.
    Source: arXiv 1607.06450; torch.nn.LayerNorm.
    """
    return registry.active().layer_norm(x, weight, bias, eps)


def add_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """A sum and its root-mean-square norm.

    Semantics: total = branch + residual, rounded to their dtype; then `rms_norm` of total.
    Args: branch, residual: [..., E], of one dtype. The branch's content is lost, unless one of them needs a gradient.
    Returns: total and the norm.
    """
    return registry.active().add_rms_norm(branch, residual, weight, eps)


def add_layer_norm(
    branch: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """A sum and its layer norm: as `add_rms_norm`, with `layer_norm`."""
    return registry.active().add_layer_norm(branch, residual, weight, bias, eps)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each element.

    Args: x: any shape. It is used as scratch and its content is lost, unless it needs a gradient.
    Source: GELU, arXiv 1606.08415, exact and with tanh; SiLU, arXiv 1702.03118.
    """
    return registry.active().activate(x, activation)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation of the first half times the second half.

    Semantics: with gate, up = the halves of the last dimension, activation(gate) * up.
    Args: gate_up: [T, 2F], gate before up. It is used as scratch and its content is lost, unless it needs a gradient.
    Returns: [T, F].
    Source: arXiv 2002.05202 (SwiGLU, GEGLU).
    """
    return registry.active().gated_activation(gate_up, activation)


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """GPT-OSS's gated activation.

    Semantics: with gate, up = the even and the odd columns, gate at most `limit`, up within +-limit:
        gate * sigmoid(alpha * gate) * (up + 1)
    Args: gate_up: [T, 2F].
    Returns: [T, F].
    Source: arXiv 2508.10925.
    """
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(min=-limit, max=limit)
    return gate * elementwise(torch.sigmoid, gate * alpha) * (up + 1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position, half-split layout.

    Semantics: with x1, x2 = the halves of the first R dimensions: [x1*cos - x2*sin, x2*cos + x1*sin]; dimensions from R
    on are copied (partial rotary).
    Args: x: [T, H, D]. cos, sin: [T, 1, R/2], in x's dtype (as transformers casts them).
    Returns: [T, H, D].
    Source: RoFormer, arXiv 2104.09864; the half-split layout is transformers' `rotate_half`.
    """
    return registry.active().apply_rotary(x, cos, sin)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value in its slot; every other slot is untouched.

    Args:
        key, value: [T, K, D].
        key_cache, value_cache: [num_blocks, block_size, K, D].
        slots: [T] int64; slot = block * block_size + offset, all different.
    """
    registry.active().write_kv(key, value, key_cache, value_cache, slots)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`apply_rotary` of queries and keys, and `write_kv` of the rotated keys and the values.

    Args: query: [T, H, D]; its content is lost. All others as there; a value may be a key as it was before.
    Returns: the rotated queries, [T, H, D].
    """
    return registry.active().rotate_and_write(query, key, value, cos, sin, key_cache, value_cache, slots)


def plan_attention(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    window: int | None = None,
    device: torch.device,
) -> AttentionPlan:
    """Decide how one step's sequences are attended.

    Args:
        query_lens: new tokens of each sequence, in packed order.
        total_lens: tokens each sequence has in the cache after this step's keys are written.
        block_tables: block ids of each sequence; entry i holds tokens [i * block_size, (i + 1) * block_size). Entries
            that lie wholly behind the window are not read.
        window: a token sees this many tokens, itself included; None for all.

    Returns: for `paged_attention` of the same implementation.
    """
    return registry.active().plan_attention(
        query_lens, total_lens, block_tables, block_size=block_size, window=window, device=device
    )


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: AttentionScores
) -> Tensor:
    """Causal attention of each new token over its own sequence.

    Semantics: for token t of sequence s at position p: softmax(scores(q_t . K_s[0..p])) @ V_s[0..p], or from p - window
    + 1 on if the plan was made with a window.
    Args:
        query: [T, H, D]; H a multiple of K (grouped-query attention: query head h reads KV head h // (H / K)).
        key_cache, value_cache: [num_blocks, block_size, K, D], this step's tokens already written.
    Returns: [T, H, D].
    Source: PagedAttention, arXiv 2309.06180; GQA, arXiv 2305.13245.
    """
    return registry.active().paged_attention(query, key_cache, value_cache, plan, scores)


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """A token for each row, by its cumulative distribution inverted at its own random number.

    Semantics: p = softmax(logits / temperature). Where a draw has top_k, top_p or min_p, tokens stand best first, of
    equals the lower id first; of these top_k are kept, then those before which less than top_p of what is left comes,
    then those of at least min_p times the best. Without any of the three they stand by id.
    Args: logits: [N, V]; -inf is never taken. draws: N.
    Returns: N ids; -1 where the first logit is NaN, as all are in a row that overflowed, or no logit is above -inf.
    Source: top-p, arXiv 1904.09751; min-p, arXiv 2407.01082; the random numbers are numpy's Philox.
    """
    return registry.active().draw_tokens(logits, draws)


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> TokenLogprobs:
    """The log-probability of one token of each row, its rank, and the row's `count` best tokens, of equals the lower id
    first.

    Args: logits: [N, V]. token_ids: [N] int64. count: at most V.
    """
    return registry.active().token_logprobs(logits, token_ids, count)
