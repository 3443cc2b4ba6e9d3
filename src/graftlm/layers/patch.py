"""What an adapter does to a model: the run-time form of the adapter algebra.

`adapters/` compiles PEFT's methods to these; the layers apply them and never ask which method it was. Per linear layer:

    y = post(W' pre(x) + b') + low_rank(x)

and, only while an adapter is trained with dropout, + low_rank(mask(x)); with everything absent by default. Anything
absent costs nothing; nothing here ever writes to the base's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NewType, Protocol

from torch import Tensor

from graftlm.kernels.ops import LoraUpdate, LoraUpdates
from graftlm.quantization import Weight

# Name of a layer that can be patched, such as "layers.3.qkv"; unique in a model.
Slot = NewType("Slot", str)


class InputTransform(Protocol):
    """What happens to a layer's input before the weight (IA3's feed-forward scale, OFT's rotation)."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, in], x unchanged."""
        ...

    def fold(self, weight: Tensor) -> Tensor:
        """The matrix that does to x what `weight` does to the transformed x. weight: [out, in] float32, unchanged."""
        ...


class OutputTransform(Protocol):
    """What happens to the output after the base's weight and bias (DoRA's scale, a replaced bias, RoAd's rotation)."""

    @property
    def num_bytes(self) -> int: ...

    def apply(self, out: Tensor) -> None:
        """out: [T, n], changed in place."""
        ...

    def fold_weight(self, weight: Tensor) -> Tensor:
        """The matrix that, with `fold_bias`, gives the transformed output. weight: [n, in] float32, unchanged."""
        ...

    def fold_bias(self, bias: Tensor | None) -> Tensor | None:
        """bias: [n] float32, unchanged, or None for no bias; so is the result."""
        ...


@dataclass(frozen=True, kw_only=True)
class PartOverride:
    """Output columns [out_start, out_stop) computed anew: `weight` (the base's own rows, or the adapter's) times the
    transformed input, plus `bias`."""

    out_start: int
    out_stop: int
    weight: Weight
    bias: Tensor | None = None
    transform: InputTransform | None = None
    # Rows of the base cost the adapter nothing.
    owned: bool = True

    @property
    def num_bytes(self) -> int:
        weight = self.weight.num_bytes if self.owned else 0
        return weight + _bytes(self.bias) + (0 if self.transform is None else self.transform.num_bytes)


@dataclass(frozen=True, kw_only=True)
class PartTransform:
    """Output columns [out_start, out_stop) transformed in place."""

    out_start: int
    out_stop: int
    transform: OutputTransform


class InputMask(Protocol):
    """What dropout leaves of a layer's input."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in], all rows of a segment -> the same with some elements zero, [T, in], x unchanged."""
        ...

    def from_row(self, row: int) -> InputMask:
        """The mask of a segment without the rows before `row`; it may end earlier too."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScaledWeight:
    """gain * (u @ weight.T). gain: [n] float32."""

    weight: Weight
    gain: Tensor


@dataclass(frozen=True, kw_only=True)
class MaskedUpdate:
    """What is added to output columns [out_start, out_stop) of a part u = mask(x) of the input: a low-rank update of u,
    whose matrices are as wide as the whole layer, and, for DoRA, a multiple of the base's result."""

    out_start: int
    out_stop: int
    mask: InputMask
    low_rank: LoraUpdate
    scaled: ScaledWeight | None = None

    @property
    def num_bytes(self) -> int:
        return self.low_rank.num_bytes + (0 if self.scaled is None else self.scaled.gain.nbytes)

    def from_row(self, row: int) -> MaskedUpdate:
        return replace(self, mask=self.mask.from_row(row))


@dataclass(frozen=True, kw_only=True)
class LinearPatch:
    """One linear layer. Order: overrides, then output transforms, then the low-rank updates.

    masked: each sees a part of the input; of an adapter that is being trained only.
    """

    overrides: tuple[PartOverride, ...] = ()
    outputs: tuple[PartTransform, ...] = ()
    low_rank: LoraUpdate | None = None
    masked: tuple[MaskedUpdate, ...] = ()

    @property
    def is_low_rank(self) -> bool:
        """Whether there is a low-rank update and nothing else."""
        return self.low_rank is not None and not (self.overrides or self.outputs or self.masked)

    @property
    def num_bytes(self) -> int:
        return (
            sum(override.num_bytes for override in self.overrides)
            + sum(output.transform.num_bytes for output in self.outputs)
            + (0 if self.low_rank is None else self.low_rank.num_bytes)
            + sum(update.num_bytes for update in self.masked)
        )


@dataclass(frozen=True, kw_only=True)
class ReplacedRows:
    """Rows of an embedding or head that an adapter has its own values for. ids: [n] int64, ascending, different.
    values: [n, E]."""

    ids: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes


@dataclass(frozen=True, kw_only=True)
class EmbeddingPatch:
    """The token embedding: e(t) = scale * (table[t] + shrink[t] @ expand), then replaced rows.

    table: [V', E], instead of the base's. shrink: [V', R], expand: [R, E], float32. scale: [E] (DoRA), float32.
    Ranks may share out the rows of the first two.
    rows: of the table; like all others they get the factor the base's embedding has. inputs: what comes out of the
    embedding for ids that no table holds (virtual tokens).
    """

    table: Weight | None = None
    shrink: Weight | None = None
    expand: Tensor | None = None
    scale: Tensor | None = None
    rows: ReplacedRows | None = None
    inputs: ReplacedRows | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.table, self.shrink, self.rows, self.inputs)
        return _bytes(self.expand) + _bytes(self.scale) + sum(part.num_bytes for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True)
class HeadPatch:
    """The output head: a linear patch over the adapter's vocabulary, then replaced rows, which get no bias.

    vocab_size: rows the adapter's head has when they are not the base's number; the patch then computes all of them,
    and logits beyond are -inf.
    """

    linear: LinearPatch = field(default_factory=LinearPatch)
    vocab_size: int | None = None
    rows: ReplacedRows | None = None

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes + (0 if self.rows is None else self.rows.num_bytes)

    def from_row(self, row: int) -> HeadPatch:
        """For a segment without the rows before `row`."""
        masked = tuple(update.from_row(row) for update in self.linear.masked)
        return replace(self, linear=replace(self.linear, masked=masked))


@dataclass(frozen=True, kw_only=True)
class NormPatch:
    """A norm's weight and bias, [E] each, used instead of the base's."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + _bytes(self.bias)


@dataclass(frozen=True, kw_only=True)
class PrefixPatch:
    """Keys and values of a sequence's first n positions, instead of those computed there.

    keys, values: one for each of the decoder's sets of keys and values, [n, K, D]; keys as they are after rotation.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


@dataclass(frozen=True, kw_only=True)
class ModelPatch:
    """Everything an adapter does. stack: what it does inside the layers, if they are others than the decoder's; linears
    and norms then hold only what is outside them. on_demand: linears are made anew whenever they are asked for."""

    linears: Mapping[Slot, LinearPatch] = field(default_factory=dict)
    norms: Mapping[Slot, NormPatch] = field(default_factory=dict)
    embedding: EmbeddingPatch | None = None
    head: HeadPatch | None = None
    prefix: PrefixPatch | None = None
    stack: LayerStack | None = None
    on_demand: bool = False

    @cached_property
    def low_rank(self) -> LoraUpdates:
        """The updates of the linear layers that it changes by nothing else."""
        if self.on_demand:
            return LoraUpdates(by_layer={})
        return LoraUpdates(
            by_layer={
                slot: patch.low_rank
                for slot, patch in self.linears.items()
                if patch.low_rank is not None and slot not in self.other_linears
            }
        )

    @cached_property
    def other_linears(self) -> Mapping[Slot, LinearPatch]:
        """The linear layers that it changes by more than a low-rank update; on demand, all that it changes."""
        return (
            self.linears
            if self.on_demand
            else {slot: patch for slot, patch in self.linears.items() if not patch.is_low_rank}
        )

    @property
    def num_bytes(self) -> int:
        single = (self.embedding, self.head, self.prefix, self.stack)
        return (
            sum(patch.num_bytes for patch in self.linears.values())
            + sum(patch.num_bytes for patch in self.norms.values())
            + sum(patch.num_bytes for patch in single if patch is not None)
        )


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """Layers in the place of the decoder's: at depth d its layer `layers[d]`, under that layer's own slots in
    `patches[d]`."""

    layers: tuple[int, ...]
    patches: tuple[ModelPatch, ...]

    @property
    def num_bytes(self) -> int:
        return sum(patch.num_bytes for patch in self.patches)


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
