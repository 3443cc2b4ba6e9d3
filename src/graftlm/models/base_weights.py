"""Reading the base's weights, for adapters whose meaning depends on them (DoRA's norms, PiSSA's residual)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.layers.patch import Slot
from graftlm.models.decoder import Decoder
from graftlm.models.site import HEAD_SLOT, SiteMap
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

    def norm(self, path: str) -> Tensor:
        """Weight of a norm, [E]."""
        ...

    def embedding(self) -> Tensor:
        """The embedding table, [V, E]."""
        ...


class DecoderWeights:
    """`BaseWeights` of a decoder in memory."""

    def __init__(self, decoder: Decoder) -> None:
        self.sites = decoder.sites
        self.dtype = decoder.dtype
        self.device = decoder.device
        self._embedding = decoder.embedding
        self._head = decoder.head
        layers = decoder.layers
        linears = [
            linear
            for layer in layers
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        ]
        norms = [norm for layer in layers for norm in (layer.pre_attention_norm, layer.pre_mlp_norm)]
        self._linears = {linear.slot: linear for linear in linears}
        self._norms: dict[Slot, Tensor] = {norm.slot: norm.weight for norm in (*norms, decoder.final_norm)}

    def linear(self, path: str) -> Weight:
        site = self.sites.linears[path]
        if site.slot == HEAD_SLOT:
            return self._head.weight
        return self._linears[site.slot].weight.part(site.start, site.stop)

    def bias(self, path: str) -> Tensor | None:
        site = self.sites.linears[path]
        bias = None if site.slot == HEAD_SLOT else self._linears[site.slot].bias
        return None if bias is None else bias[site.start : site.stop]

    def norm(self, path: str) -> Tensor:
        return self._norms[self.sites.norms[path]]

    def embedding(self) -> Tensor:
        return self._embedding.weight.dequantize()


class CheckpointWeights:
    """`BaseWeights` read from disk one by one: to check an adapter without loading the model."""

    def __init__(self, checkpoint: Checkpoint, sites: SiteMap) -> None:
        self.sites = sites
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self._checkpoint = checkpoint

    def linear(self, path: str) -> Weight:
        name = f"{path}.weight"
        if path == self.sites.head_path and name not in self._checkpoint.tensor_names():
            return DenseWeight(self.embedding())
        return DenseWeight(self._checkpoint.read(name).float())

    def bias(self, path: str) -> Tensor | None:
        name = f"{path}.bias"
        return self._checkpoint.read(name).float() if name in self._checkpoint.tensor_names() else None

    def norm(self, path: str) -> Tensor:
        return self._checkpoint.read(f"{path}.weight").float()

    def embedding(self) -> Tensor:
        return self._checkpoint.read(f"{self.sites.embedding_path}.weight").float()
