"""Decoder layers: how attention, feed-forward, norms and residuals are wired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.attention import SelfAttention
from graftlm.layers.linear import Linear
from graftlm.layers.mlp import FeedForward
from graftlm.layers.norm import Norm, added, normed
from graftlm.layers.step import DecoderStep


class Block(Protocol):
    """One decoder layer."""

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        """hidden: [T, E] -> [T, E]."""
        ...


class BlocksRunner(Protocol):
    """How layers are computed: as they come, from a recording, or again in the backward pass."""

    def __call__(self, blocks: Sequence[Block], hidden: Tensor, step: DecoderStep) -> Tensor:
        """One layer after the other. hidden: [T, E] -> [T, E]."""
        ...


def run_blocks(blocks: Sequence[Block], hidden: Tensor, step: DecoderStep) -> Tensor:
    """As they come."""
    for block in blocks:
        hidden = block(hidden, step)
    return hidden


@dataclass(frozen=True, kw_only=True)
class SequentialBlock:
    """Attention, then feed-forward; each branch may be normed before, after, or both.

    residual_after_norm: what is added to a branch is its normed input (BLOOM's option).
    """

    attention: SelfAttention
    mlp: FeedForward
    pre_attention_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    pre_mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    residual_after_norm: bool = False

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        segments = step.batch.segments
        x = normed(hidden, self.pre_attention_norm, segments)
        branch = normed(self.attention(x, step), self.post_attention_norm, segments)
        residual = x if self.residual_after_norm else hidden
        hidden, x = added(branch, residual, self.pre_mlp_norm, segments)
        branch = normed(self.mlp(x, segments), self.post_mlp_norm, segments)
        return ops.add(branch, x if self.residual_after_norm else hidden)


@dataclass(frozen=True, kw_only=True)
class ParallelBlock:
    """Attention and feed-forward read the same input, under one norm or each under its own."""

    attention: SelfAttention
    mlp: FeedForward
    pre_attention_norm: Norm
    pre_mlp_norm: Norm | None

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        segments = step.batch.segments
        x = self.pre_attention_norm(hidden, segments)
        mlp_input = x if self.pre_mlp_norm is None else self.pre_mlp_norm(hidden, segments)
        return ops.add(ops.add(self.attention(x, step), self.mlp(mlp_input, segments)), hidden)


@dataclass(frozen=True, kw_only=True)
class PostNormBlock:
    """The original transformer's order: the sum of branch and residual is normed."""

    attention: SelfAttention
    mlp: FeedForward
    post_attention_norm: Norm
    post_mlp_norm: Norm

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        segments = step.batch.segments
        _, hidden = self.post_attention_norm.of_sum(self.attention(hidden, step), hidden, segments)
        _, hidden = self.post_mlp_norm.of_sum(self.mlp(hidden, segments), hidden, segments)
        return hidden


@dataclass(frozen=True, kw_only=True)
class LayerInputBlock:
    """A block, after which the layer's own input is added: norm(up(activation(gate(x)) * input)).

    index: which of the step's layer inputs it reads.
    """

    block: Block
    index: int
    gate: Linear
    activation: ops.Activation
    up: Linear
    norm: Norm

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        segments = step.batch.segments
        hidden = self.block(hidden, step)
        gated = ops.activate(self.gate(hidden, segments), self.activation) * step.layer_inputs[self.index]
        return hidden + self.norm(self.up(gated, segments), segments)


@dataclass(frozen=True, kw_only=True)
class ScaledBlock:
    """A block whose output is multiplied by a number. scalar: [1]."""

    block: Block
    scalar: Tensor

    def __call__(self, hidden: Tensor, step: DecoderStep) -> Tensor:
        return self.block(hidden, step) * self.scalar
