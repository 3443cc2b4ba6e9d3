"""A rank's part of what an adapter does, cut from the whole: the same way as the layers it belongs to.

    layer            | weight     | A          | B        | bias, output transform
    some of the rows | own rows   | whole      | own rows | own rows
    some of the columns | own columns | own inputs | whole | whole, after the sum

so that the adapter's product is in the state of the base's: a part of the result, or a summand of it. Of an adapter's
own token table, and of its A where it adapts the base's, each rank has some rows.
Source: S-LoRA, arXiv 2311.03285, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graftlm.errors import AdapterUnsupported
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.collective import Collective
from graftlm.layers.linear import Linear
from graftlm.layers.patch import (
    EmbeddingPatch,
    InputTransform,
    LinearPatch,
    ModelPatch,
    OutputTransform,
    PartOverride,
    PartTransform,
    PrefixPatch,
    Slot,
)
from graftlm.layers.transforms import Affine, BlockRotation, InputScale, PairRotation, Successive
from graftlm.layers.vocabulary_parallel import VocabularyParallelWeight
from graftlm.models.tensor_share import HeadShare, MatrixShare, Part, divide
from graftlm.quantization import DenseWeight, Weight
from graftlm.quantization.own_memory import with_own_memory


class PatchShard:
    """Cuts patches for one rank, or for a span that has some rows of a layer.

    Args:
        shares: the parts of matrices it has; what is not named is whole.
        linears: the layers it has, whole or in part; a patch that uses the base's weights gets theirs.
        collective: the ranks, if there are any. The logits of the first are read; the others need no patch of the head,
            which stays whole.
        key_heads: of each layer with keys of its own that the rank has; None for all of them.
    """

    def __init__(
        self,
        shares: Mapping[Slot, MatrixShare],
        linears: Mapping[Slot, Linear],
        *,
        collective: Collective | None = None,
        key_heads: Sequence[HeadShare] | None = None,
    ) -> None:
        self._shares = shares
        self._linears = linears
        self._collective = collective
        self._key_heads = key_heads

    def cut(self, patch: ModelPatch) -> ModelPatch:
        """What concerns this rank. patch: of these layers, and compiled against whole weights.

        Raises:
            AdapterUnsupported: a method's groups do not lie within the ranks' parts; the message names the layer.
        """
        return replace(
            patch,
            linears={slot: self._linear(slot, linear) for slot, linear in patch.linears.items()},
            embedding=None if patch.embedding is None else self._embedding(patch.embedding),
            head=patch.head if self._collective is None or self._collective.rank == 0 else None,
            prefix=None if patch.prefix is None else self._prefix(patch.prefix),
        )

    def _embedding(self, patch: EmbeddingPatch) -> EmbeddingPatch:
        if self._collective is None:
            return patch
        return replace(
            patch,
            table=None if patch.table is None else _some_tokens(patch.table, self._collective),
            shrink=None if patch.shrink is None else _some_tokens(patch.shrink, self._collective),
        )

    def _prefix(self, prefix: PrefixPatch) -> PrefixPatch:
        if self._key_heads is None:
            return prefix
        parts = [slice(head.keys.start, head.keys.stop) for head in self._key_heads]
        return PrefixPatch(
            keys=tuple(keys[:, part].clone() for keys, part in zip(prefix.keys, parts, strict=True)),
            values=tuple(values[:, part].clone() for values, part in zip(prefix.values, parts, strict=True)),
        )

    def _linear(self, slot: Slot, patch: LinearPatch) -> LinearPatch:
        share = self._shares.get(slot)
        if share is None:
            return self._whole(slot, patch)
        if share.columns is not None:
            return self._some_columns(slot, patch, share.columns)
        return self._some_rows(slot, patch, share)

    def _whole(self, slot: Slot, patch: LinearPatch) -> LinearPatch:
        own = self._linears[slot].weight
        overrides = tuple(
            override if override.owned else replace(override, weight=own.part(override.out_start, override.out_stop))
            for override in patch.overrides
        )
        return replace(patch, overrides=overrides)

    def _some_columns(self, slot: Slot, patch: LinearPatch, columns: Part) -> LinearPatch:
        overrides = tuple(self._override_columns(slot, override, columns) for override in patch.overrides)
        low_rank = patch.low_rank
        if low_rank is not None:
            low_rank = LoraUpdate(
                shrink=low_rank.shrink[columns.start : columns.stop].clone(), expands=low_rank.expands
            )
        return LinearPatch(overrides=overrides, outputs=patch.outputs, low_rank=low_rank)

    def _override_columns(self, slot: Slot, override: PartOverride, columns: Part) -> PartOverride:
        start, stop = override.out_start, override.out_stop
        transform = None if override.transform is None else _cut_inputs(override.transform, columns)
        if override.transform is not None and transform is None:
            # Its groups reach over the ranks' bounds: the transform goes into a matrix of the adapter's own.
            whole = override.weight.dequantize()
            folded = override.transform.fold(whole.float())[:, columns.start : columns.stop]
            weight: Weight = DenseWeight(folded.to(whole.dtype).contiguous())
            return replace(override, weight=weight, transform=None, owned=True)
        if override.owned:
            weight = override.weight.column_part(columns.start, columns.stop)
        else:
            weight = self._linears[slot].weight.part(start, stop)
        return replace(override, weight=weight, transform=transform)

    def _some_rows(self, slot: Slot, patch: LinearPatch, share: MatrixShare) -> LinearPatch:
        own = self._linears[slot].weight
        overrides: list[PartOverride] = []
        outputs: list[PartTransform] = []
        for override in patch.overrides:
            for place, part in _own_rows(share, override.out_start, override.out_stop):
                bias = None if override.bias is None else override.bias[part.start : part.stop].clone()
                weight = own.part(place.start, place.stop)
                if override.owned:
                    weight = with_own_memory(override.weight.part(part.start, part.stop))
                cut = replace(override, out_start=place.start, out_stop=place.stop, weight=weight, bias=bias)
                overrides.append(cut)
        for output in patch.outputs:
            for place, part in _own_rows(share, output.out_start, output.out_stop):
                transform = _cut_outputs(output.transform, part, slot)
                outputs.append(PartTransform(out_start=place.start, out_stop=place.stop, transform=transform))
        low_rank = None if patch.low_rank is None else _cut_expands(patch.low_rank, share)
        return LinearPatch(overrides=tuple(overrides), outputs=tuple(outputs), low_rank=low_rank)


def _some_tokens(table: Weight, ranks: Collective) -> Weight:
    """An adapter's vocabulary may be larger than the base's: it is shared out for itself."""
    parts = divide(table.shape[0], ranks.size, "tokens in the vocabulary")
    own = with_own_memory(table.part(parts[ranks.rank].start, parts[ranks.rank].stop))
    return VocabularyParallelWeight(own, tuple((part.start, part.stop) for part in parts), ranks)


def _own_rows(share: MatrixShare, start: int, stop: int) -> list[tuple[Part, Part]]:
    """Where the rank has rows of [start, stop), and which of them these are."""
    found, place = [], 0
    for rows in share.rows:
        part = rows.within(start, stop)
        if part is not None:
            offset = place + start + part.start - rows.start
            found.append((Part(start=offset, stop=offset + part.stop - part.start), part))
        place += rows.stop - rows.start
    return found


def _cut_expands(update: LoraUpdate, share: MatrixShare) -> LoraUpdate:
    expands = [
        LoraExpand(
            matrix=expand.matrix[:, part.start : part.stop].contiguous(),
            out_start=place.start,
            out_stop=place.stop,
            rank_start=expand.rank_start,
            rank_stop=expand.rank_stop,
        )
        for expand in update.expands
        for place, part in _own_rows(share, expand.out_start, expand.out_stop)
    ]
    return LoraUpdate(shrink=update.shrink, expands=tuple(expands))


def _cut_inputs(transform: InputTransform, part: Part) -> InputTransform | None:
    """None: the inputs of a part do not depend on this part alone."""
    if isinstance(transform, InputScale):
        return InputScale(factors=transform.factors[part.start : part.stop].clone())
    if isinstance(transform, Successive):
        rotations = [_cut_rotation(rotation, part) for rotation in transform.transforms]
        kept = tuple(rotation for rotation in rotations if rotation is not None)
        return Successive(transforms=kept) if len(kept) == len(rotations) else None
    return _cut_rotation(transform, part) if isinstance(transform, BlockRotation) else None


def _cut_rotation(rotation: BlockRotation, part: Part) -> BlockRotation | None:
    size = rotation.blocks.shape[-1]
    if rotation.order is not None or part.start % size or part.stop % size:
        return None
    if len(rotation.blocks) == 1:
        return rotation
    return BlockRotation(blocks=rotation.blocks[part.start // size : part.stop // size].clone())


def _cut_outputs(transform: OutputTransform, part: Part, slot: Slot) -> OutputTransform:
    own = slice(part.start, part.stop)
    if isinstance(transform, Affine):
        scale, shift = (
            None if tensor is None else tensor[own].clone() for tensor in (transform.scale, transform.shift)
        )
        return Affine(scale=scale, shift=shift)
    if isinstance(transform, PairRotation) and not (
        part.start % transform.group_size or part.stop % transform.group_size
    ):
        return PairRotation(
            straight=transform.straight[own].clone(),
            crossed=transform.crossed[own].clone(),
            group_size=transform.group_size,
        )
    raise AdapterUnsupported(
        f"{type(transform).__name__} of {slot} mixes outputs that different ranks compute",
        got=f"outputs {part.start} to {part.stop - 1} on one rank",
        do="train it with smaller groups, or serve it without tensor_parallel",
    )
