"""Reading the base's weights, for adapters whose meaning depends on them (DoRA's norms, PiSSA's residual)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.layers.head import OutputHead
from graftlm.layers.linear import Linear
from graftlm.models.decoder import DecoderSpan
from graftlm.models.layout import HEAD_SLOT, ModuleLayout
from graftlm.models.read import read_sites, read_spec
from graftlm.models.site import SiteMap
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensors import NamedTensors
from graftlm.quantization import DenseWeight, Weight


class BaseWeights(Protocol):
    """The weights behind a site map. Nothing that is returned may be written to."""

    sites: SiteMap
    dtype: torch.dtype
    device: torch.device

    def linear(self, path: str) -> Weight:
        """Weight of a linear module, the head included: [out, in]."""
        ...

    def bias(self, path: str) -> Tensor | None:
        """Bias of a linear module, [out]."""
        ...

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a norm, [E] each."""
        ...

    def embedding(self) -> Tensor:
        """The embedding table, [V, E]."""
        ...


class DecoderWeights:
    """`BaseWeights` of a decoder in memory.

    Args:
        elsewhere: answers for what is not in `span`; not needed for a whole decoder.
    """

    def __init__(self, span: DecoderSpan, elsewhere: BaseWeights | None = None) -> None:
        self.sites = span.sites
        self.dtype = span.dtype
        self.device = span.device
        self._span = span
        self._elsewhere = elsewhere

    def linear(self, path: str) -> Weight:
        site = self.sites.matrices[path]
        if site.slot == HEAD_SLOT and self._span.output is not None:
            return self._span.output.head.weight
        # Of what is divided among the spans, whole rows are elsewhere.
        if site.slot in self._span.linears and site.slot not in self._span.shares:
            return self._span.linears[site.slot].weight.part(site.start, site.stop)
        return self._rest(path).linear(path)

    def bias(self, path: str) -> Tensor | None:
        site = self.sites.matrices[path]
        layer: OutputHead | Linear
        if site.slot == HEAD_SLOT and self._span.output is not None:
            layer = self._span.output.head
        elif site.slot in self._span.linears and site.slot not in self._span.shares:
            layer = self._span.linears[site.slot]
        else:
            return self._rest(path).bias(path)
        return None if layer.bias is None else layer.bias[site.start : site.stop]

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        slot = self.sites.norms[path].slot
        if slot not in self._span.norms:
            return self._rest(path).norm(path)
        norm = self._span.norms[slot]
        if norm.weight is None:
            raise KeyError(path)  # a norm without a weight is no site
        return norm.weight, norm.bias

    def embedding(self) -> Tensor:
        if self._span.embedding is None:
            return self._rest(self.sites.embedding_path).embedding()
        return self._span.embedding.tokens.weight.dequantize()

    def _rest(self, path: str) -> BaseWeights:
        if self._elsewhere is None:
            raise KeyError(path)
        return self._elsewhere


class CheckpointWeights:
    """`BaseWeights` read from disk one by one: to check an adapter without loading the model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        family, _ = read_spec(checkpoint)
        self.sites = read_sites(checkpoint)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self._tensors = NamedTensors(checkpoint, family.names)
        self._stored = StoredWeights(self._tensors)

    def linear(self, path: str) -> Weight:
        if path == self.sites.head_path and self.sites.tied_head:
            return DenseWeight(self.embedding())
        site = self.sites.matrices[path]
        name, _, index = path.rpartition(".")
        if name in self.sites.expert_stacks and not self._stored.is_quantized(path):
            matrix = self._read(name)[int(index)]
            return DenseWeight(matrix.t() if site.transposed else matrix)
        module = ModuleLayout(path=path, rows=site.out_features, transposed=site.transposed)
        return DenseWeight(self._full(module, site.in_features))

    def bias(self, path: str) -> Tensor | None:
        name, _, index = path.rpartition(".")
        if name in self.sites.expert_stacks:
            stacked = self._optional(f"{name}_bias")
            return None if stacked is None else stacked[int(index)]
        return self._optional(f"{path}.bias")

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        return self._read(f"{path}.weight"), self._optional(f"{path}.bias")

    def embedding(self) -> Tensor:
        table = ModuleLayout(path=self.sites.embedding_path, rows=self.sites.vocab_size)
        return self._full(table, self.sites.embedding_size)

    def _full(self, module: ModuleLayout, in_features: int) -> Tensor:
        return self._stored.full(module, in_features, dtype=self.dtype, device=self.device).float()

    def _read(self, name: str) -> Tensor:
        return self._tensors.read(name).float()

    def _optional(self, name: str) -> Tensor | None:
        return self._read(name) if name in self._tensors else None
