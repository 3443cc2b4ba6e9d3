"""Collects what a method does to single modules and compiles it to the patch of a model.

Methods speak of modules under their own paths and of full matrices. Which projections are fused, how ranks stack and
how vocabularies of different size meet is decided here, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graftlm.adapters.adapter import BoundModule
from graftlm.errors import AdapterCorrupt
from graftlm.kernels import ops
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.patch import (
    EmbeddingPatch,
    HeadPatch,
    InputMask,
    InputTransform,
    LinearPatch,
    MaskedUpdate,
    ModelPatch,
    NormPatch,
    OutputTransform,
    PartOverride,
    PartTransform,
    PrefixPatch,
    ReplacedRows,
    ScaledWeight,
    Slot,
)
from graftlm.layers.patches_on_demand import PatchesOnDemand
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import BaseWeights
from graftlm.models.site import LinearSite
from graftlm.quantization import DenseWeight, Weight


class _Pair(NamedTuple):
    lora_a: Tensor
    lora_b: Tensor
    scaling: float


@dataclass(frozen=True, kw_only=True)
class _MaskedPair:
    mask: InputMask
    factors: _Pair
    gain: Tensor | None


@dataclass(kw_only=True)
class _LinearChanges:
    weight: Tensor | None = None
    bias: Tensor | None = None
    input: InputTransform | None = None
    outputs: list[OutputTransform] = field(default_factory=list)
    pairs: list[_Pair] = field(default_factory=list)
    masked: list[_MaskedPair] = field(default_factory=list)
    rows: ReplacedRows | None = None


@dataclass(kw_only=True)
class _EmbeddingChanges:
    table: Weight | None = None
    shrink: Weight | None = None
    expand: Tensor | None = None
    scale: Tensor | None = None
    rows: ReplacedRows | None = None
    inputs: ReplacedRows | None = None


class PatchBuilder:
    """One adapter's changes. All paths are modules of `base.sites`; shapes were checked by the caller."""

    def __init__(self, base: BaseWeights) -> None:
        self._base = base
        self._linears: dict[str, _LinearChanges] = defaultdict(_LinearChanges)
        self._norms: dict[Slot, NormPatch] = {}
        self._embedding: _EmbeddingChanges | None = None
        self._prefix: PrefixPatch | None = None
        self._modules: dict[str, BoundModule] = {}

    @property
    def modules(self) -> tuple[BoundModule, ...]:
        """What has been changed so far, in model order."""
        sites = self._base.sites
        order = {path: index for index, path in enumerate((*sites.matrices, *sites.norms))}
        order |= {path: order[stack.experts[0]] for path, stack in sites.expert_stacks.items()}
        return tuple(sorted(self._modules.values(), key=lambda module: order.get(module.path, -1)))

    def describe(self, path: str, change: str, *, rank: int | None = None, scaling: float | None = None) -> None:
        """Note for people what happens to a module, such as "LoRA" or "replaced"."""
        known = self._modules.get(path)
        changes = (change,) if known is None else (*known.changes, change)
        if known is not None and rank is None:
            rank, scaling = known.rank, known.scaling
        self._modules[path] = BoundModule(path=path, changes=changes, rank=rank, scaling=scaling)

    def add_low_rank(self, path: str, lora_a: Tensor, lora_b: Tensor) -> None:
        """y += (x @ lora_a.T) @ lora_b.T. lora_a: [R, in], lora_b: [out, R], every scaling multiplied in.

        Raises:
            AdapterCorrupt: a factor overflows float32 with its scaling.
        """
        if not (torch.isfinite(lora_a).all() and torch.isfinite(lora_b).all()):
            raise AdapterCorrupt(f"lora_B of {path} times its scaling is not finite")
        self.add_factors(path, lora_a, lora_b)

    def add_factors(self, path: str, lora_a: Tensor, lora_b: Tensor, scaling: float = 1.0) -> None:
        """As `add_low_rank`, of factors that are being trained and may become what they must not be. scaling: of what
        they add, still to be multiplied in."""
        self._linears[path].pairs.append(_Pair(lora_a, lora_b, scaling))

    def add_masked_factors(
        self,
        path: str,
        mask: InputMask,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
        gain: Tensor | None = None,
    ) -> None:
        """y += scaling * (u @ lora_a.T) @ lora_b.T + gain * (u @ W.T) with u = mask(x). Shapes as of `add_low_rank`;
        gain: [out].

        Of adapters that are being trained; the layer's rows must be those of the batch.
        """
        pair = _MaskedPair(mask=mask, factors=_Pair(lora_a, lora_b, scaling), gain=gain)
        self._linears[path].masked.append(pair)

    def add_prefix(self, prefix: PrefixPatch) -> None:
        """Keys and values of the virtual tokens."""
        self._prefix = prefix

    def transform_output(self, path: str, transform: OutputTransform) -> None:
        """Change the module's own output, before any low-rank update is added."""
        self._linears[path].outputs.append(transform)

    def transform_input(self, path: str, transform: InputTransform) -> None:
        """Change what the module's weight is multiplied with."""
        self._linears[path].input = transform

    def replace_linear(self, path: str, weight: Tensor, bias: Tensor | None) -> None:
        """Use another matrix, [out', in]; out' may differ from the base's for the output head only."""
        self._linears[path].weight = weight
        self._linears[path].bias = bias

    def replace_head_rows(self, rows: ReplacedRows) -> None:
        """Logits of some tokens from rows of the adapter's own. PEFT multiplies with the whole matrix, these rows in
        it, and leaves a head's bias out altogether; so it is here."""
        self._linears[self._base.sites.head_path].rows = rows

    def replace_norm(self, path: str, weight: Tensor, bias: Tensor | None) -> None:
        """weight, bias: [E]; a bias if and only if the base's norm has one."""
        patch = NormPatch(weight=self._cast(weight), bias=None if bias is None else self._cast(bias))
        self._norms[self._base.sites.norms[path].slot] = patch

    def replace_table(self, table: Tensor) -> None:
        """Use another embedding table, [V', E]."""
        self._embedding_changes().table = DenseWeight(self._cast(table))

    def add_embedding_low_rank(self, shrink: Tensor, expand: Tensor, scale: Tensor | None = None) -> None:
        """e(t) = scale * (table[t] + shrink[t] @ expand). shrink: [V', R], expand: [R, E], scale: [E]."""
        changes = self._embedding_changes()
        changes.shrink, changes.expand, changes.scale = DenseWeight(shrink), expand, scale

    def replace_embedding_rows(self, rows: ReplacedRows) -> None:
        self._embedding_changes().rows = rows

    def add_inputs(self, rows: ReplacedRows) -> None:
        """What the embedding puts out for ids beyond every vocabulary."""
        self._embedding_changes().inputs = rows

    def build(self) -> ModelPatch:
        return self._with_linears({slot: self._fuse(parts) for slot, parts in self._by_slot().items()})

    def build_on_demand(self) -> ModelPatch:
        """As `build`, but the layers' patches are made when they are asked for: for factors that are being trained."""
        makers = {slot: partial(self._fuse, parts) for slot, parts in self._by_slot().items()}
        return replace(self._with_linears(PatchesOnDemand(makers)), on_demand=True)

    def _by_slot(self) -> dict[Slot, list[tuple[LinearSite, _LinearChanges]]]:
        """Of each layer but the head, the modules that change and how."""
        by_slot: dict[Slot, list[tuple[LinearSite, _LinearChanges]]] = defaultdict(list)
        for path, site in self._base.sites.matrices.items():
            if path in self._linears and path != self._base.sites.head_path:
                by_slot[site.slot].append((site, self._linears[path]))
        return by_slot

    def _with_linears(self, linears: Mapping[Slot, LinearPatch]) -> ModelPatch:
        embedding, head_path = self._embedding, self._base.sites.head_path
        return ModelPatch(
            linears=linears,
            norms=dict(self._norms),
            embedding=None if embedding is None else EmbeddingPatch(**vars(embedding)),
            head=self._head(self._linears[head_path]) if head_path in self._linears else None,
            prefix=self._prefix,
        )

    def _embedding_changes(self) -> _EmbeddingChanges:
        if self._embedding is None:
            self._embedding = _EmbeddingChanges()
        return self._embedding

    def _head(self, changes: _LinearChanges) -> HeadPatch:
        """The head may have more or fewer rows than the base's."""
        site = self._base.sites.linears[self._base.sites.head_path]
        size = site.out_features if changes.weight is None else len(changes.weight)
        if changes.rows is not None:
            changes = self._without_bias(changes)
        linear = self._fuse([(replace(site, stop=size), changes)])
        return HeadPatch(linear=linear, vocab_size=None if size == site.out_features else size, rows=changes.rows)

    def _without_bias(self, changes: _LinearChanges) -> _LinearChanges:
        bias = self._base.bias(self._base.sites.head_path)
        if bias is None or changes.weight is not None:
            return replace(changes, bias=None)
        return replace(changes, outputs=[Affine(shift=-bias.float()), *changes.outputs])

    def _fuse(self, parts: list[tuple[LinearSite, _LinearChanges]]) -> LinearPatch:
        """One patch for a layer that may hold several modules' rows."""
        overrides = [self._override(site, changes) for site, changes in parts if self._is_override(changes)]
        outputs = [
            PartTransform(out_start=site.start, out_stop=site.stop, transform=transform)
            for site, changes in parts
            for transform in changes.outputs
        ]
        return LinearPatch(
            overrides=tuple(overrides),
            outputs=tuple(outputs),
            low_rank=self._low_rank([(site, changes.pairs) for site, changes in parts]),
            masked=tuple(self._masked(site, pair) for site, changes in parts for pair in changes.masked),
        )

    def _masked(self, site: LinearSite, pair: _MaskedPair) -> MaskedUpdate:
        scaled = None
        if pair.gain is not None:
            scaled = ScaledWeight(weight=self._base.linear(site.path), gain=self._exact(pair.gain))
        return MaskedUpdate(
            out_start=site.start,
            out_stop=site.stop,
            mask=pair.mask,
            low_rank=self._update([(site, [pair.factors])]),
            scaled=scaled,
        )

    def _is_override(self, changes: _LinearChanges) -> bool:
        return changes.weight is not None or changes.input is not None

    def _override(self, site: LinearSite, changes: _LinearChanges) -> PartOverride:
        weight, bias = self._base.linear(site.path), self._base.bias(site.path)
        if changes.weight is not None:
            weight = DenseWeight(self._cast(changes.weight))
            bias = None if changes.bias is None else self._cast(changes.bias)
        return PartOverride(
            out_start=site.start,
            out_stop=site.stop,
            weight=weight,
            bias=bias,
            transform=changes.input,
            owned=changes.weight is not None,
        )

    def _low_rank(self, parts: list[tuple[LinearSite, list[_Pair]]]) -> LoraUpdate | None:
        return self._update(parts) if any(pairs for _, pairs in parts) else None

    def _update(self, parts: list[tuple[LinearSite, list[_Pair]]]) -> LoraUpdate:
        """Modules of one fused layer share the product with their stacked As."""
        shrinks, expands, rank_start = [], [], 0
        for site, pairs in parts:
            for lora_a, lora_b, scaling in pairs:
                rank = lora_a.shape[0]
                factor_b = self._exact(lora_b) if scaling == 1.0 else self._exact(lora_b) * scaling
                expands.append(
                    LoraExpand(
                        matrix=_laid_out(factor_b.t()),
                        out_start=site.start,
                        out_stop=site.stop,
                        rank_start=rank_start,
                        rank_stop=rank_start + rank,
                    )
                )
                shrinks.append(self._exact(lora_a))
                rank_start += rank
        shrink = shrinks[0] if len(shrinks) == 1 else torch.cat(shrinks)
        update = LoraUpdate(shrink=_laid_out(shrink.t()), expands=tuple(expands))
        # What is being trained stays what it is.
        return update if any(factor.requires_grad for factor in update.factors) else update.narrowed()

    def _cast(self, tensor: Tensor) -> Tensor:
        """To the base's dtype: what replaces a tensor of the base is computed like it."""
        return tensor.to(self._base.device, self._base.dtype).contiguous()

    def _exact(self, tensor: Tensor) -> Tensor:
        """To float32 at least: PEFT, too, computes low-rank factors saved in 16 bits in float32."""
        return ops.widened(tensor.to(self._base.device))


def _laid_out(factor: Tensor) -> Tensor:
    """In the order that kernels read it in; but what is being trained is stale after one pass, and autograd would undo
    the copy."""
    return factor if factor.requires_grad else factor.contiguous()
