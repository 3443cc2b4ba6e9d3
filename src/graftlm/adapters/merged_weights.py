"""A base's weights with an adapter folded in, one tensor at a time and in float32. Knows the parts of a patch; knows
nothing of methods or files."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graftlm.adapters.adapter import Adapter, LoadedAdapter
from graftlm.errors import AdapterUnsupported
from graftlm.kernels.ops import LoraUpdate
from graftlm.layers.patch import EmbeddingPatch, LinearPatch, ReplacedRows
from graftlm.models.base_weights import BaseWeights
from graftlm.models.layout import HEAD_SLOT
from graftlm.models.site import LinearSite
from graftlm.quantization import DenseWeight, Weight


class MergedWeights:
    """`BaseWeights` of the model that a base and an adapter are together.

    Nothing is kept: every tensor is computed when it is asked for.

    Raises:
        AdapterUnsupported: no weights of this architecture do what the adapter does; the message says why.
    """

    def __init__(self, base: BaseWeights, loaded: LoadedAdapter) -> None:
        adapter = loaded.adapter
        self.dtype = torch.float32
        self.device = base.device
        self._base = base
        self._patch = loaded.weights.patch
        _check_mergeable(adapter)
        vocab_size = adapter.vocab_size or base.sites.vocab_size
        self.sites = replace(base.sites, vocab_size=vocab_size)
        self._check_biases(adapter)
        self.sites = replace(self.sites, tied_head=base.sites.tied_head and self._ends_are_equal())

    def linear(self, path: str) -> Weight:
        site = self.sites.matrices[path]
        patch = self._linear_patch(site)
        base = self._base.linear(path)
        weight = base.dequantize().float() if patch is None else _fold_linear(base, site, patch)
        rows = self._head_rows(site)
        return DenseWeight(weight if rows is None else _replace_rows(weight, rows))

    def bias(self, path: str) -> Tensor | None:
        site = self.sites.matrices[path]
        patch = self._linear_patch(site)
        base = self._base.bias(path)
        bias = None if base is None else base.float()
        if patch is not None:
            bias = _fold_bias(bias, site, patch)
        if base is None:
            return bias
        if bias is None:
            # The architecture has one all the same.
            return torch.zeros(self.linear(path).shape[0], device=self.device)
        rows = self._head_rows(site)
        return bias if rows is None else bias.index_fill(0, rows.ids, 0.0)

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        patch = self._patch.norms.get(self.sites.norms[path].slot)
        return self._base.norm(path) if patch is None else (patch.weight, patch.bias)

    def embedding(self) -> Tensor:
        table = self._base.embedding().float()
        return table if self._patch.embedding is None else _fold_embedding(table, self._patch.embedding)

    def _linear_patch(self, site: LinearSite) -> LinearPatch | None:
        if site.slot == HEAD_SLOT:
            return None if self._patch.head is None else self._patch.head.linear
        return self._patch.linears.get(site.slot)

    def _head_rows(self, site: LinearSite) -> ReplacedRows | None:
        return self._patch.head.rows if site.slot == HEAD_SLOT and self._patch.head is not None else None

    def _check_biases(self, adapter: Adapter) -> None:
        for path in self.sites.matrices:
            if self._base.bias(path) is None and self.bias(path) is not None:
                raise AdapterUnsupported(
                    f"adapter {adapter.name} cannot be merged: it gives {path} a bias, which this architecture lacks",
                    got=adapter.method,
                    do="serve it beside the base",
                )

    def _ends_are_equal(self) -> bool:
        if self._patch.embedding is None and self._patch.head is None:
            return True
        return torch.equal(self.embedding(), self.linear(self.sites.head_path).dequantize())


def _check_mergeable(adapter: Adapter) -> None:
    reason = None
    if adapter.virtual_token_ids:
        reason = "its virtual tokens stand before every prompt"
    elif adapter.invocation_token_ids:
        reason = "it changes only the tokens from its invocation on"
    elif adapter.replicates_layers:
        reason = "it has other layers than the base"
    if reason is not None:
        raise AdapterUnsupported(
            f"adapter {adapter.name} cannot be merged: {reason}", got=adapter.method, do="serve it beside the base"
        )


def _fold_linear(base: Weight, site: LinearSite, patch: LinearPatch) -> Tensor:
    """A module's matrix, [out, in] float32: overrides, then output transforms, then the low-rank update."""
    weight = base.dequantize().float()
    for override in patch.overrides:
        if override.out_start == site.start:
            weight = override.weight.dequantize().float()
            weight = weight if override.transform is None else override.transform.fold(weight)
    for output in patch.outputs:
        if output.out_start == site.start:
            weight = output.transform.fold_weight(weight)
    return weight if patch.low_rank is None else _fold_low_rank(weight, site, patch.low_rank)


def _fold_bias(bias: Tensor | None, site: LinearSite, patch: LinearPatch) -> Tensor | None:
    for override in patch.overrides:
        if override.out_start == site.start:
            bias = None if override.bias is None else override.bias.float()
    for output in patch.outputs:
        if output.out_start == site.start:
            bias = output.transform.fold_bias(bias)
    return bias


def _fold_low_rank(weight: Tensor, site: LinearSite, update: LoraUpdate) -> Tensor:
    """A module's matrix with its rows of the update, which may be of several modules at once."""
    folded = weight.clone()
    site_stop = site.start + len(weight)
    for expand in update.expands:
        start, stop = max(expand.out_start, site.start), min(expand.out_stop, site_stop)
        if start < stop:
            shrink = update.shrink[:, expand.rank_start : expand.rank_stop].float()
            rows = expand.matrix[:, start - expand.out_start : stop - expand.out_start].t().float()
            folded[start - site.start : stop - site.start] += rows @ shrink.t()
    return folded


def _fold_embedding(table: Tensor, patch: EmbeddingPatch) -> Tensor:
    if patch.table is not None:
        table = patch.table.dequantize().float()
    if patch.shrink is not None and patch.expand is not None:
        table = table + patch.shrink.dequantize() @ patch.expand
    if patch.scale is not None:
        table = table * patch.scale
    return table if patch.rows is None else _replace_rows(table, patch.rows)


def _replace_rows(matrix: Tensor, rows: ReplacedRows) -> Tensor:
    return matrix.index_copy(0, rows.ids, rows.values.to(matrix.dtype))
