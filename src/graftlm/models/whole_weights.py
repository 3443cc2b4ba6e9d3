"""The base's whole matrices for a process that has parts of them, one by one as one process would hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.kernels.registry import REFERENCE
from graftlm.models.base_weights import CheckpointWeights
from graftlm.models.layout import LinearLayout, lay_out
from graftlm.models.matrices import Matrices
from graftlm.models.read import read_spec
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensors import NamedTensors
from graftlm.quantization import Weight
from graftlm.quantization.policy import LoadPolicy


class WholeWeights:
    """`BaseWeights` read again each time, in the compute dtype, and quantised by the policy: what an adapter means does
    not depend on who computes with which part.

    Args:
        checkpoint: stays open as long as this is used. policy: as for `build_span`.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, policy: LoadPolicy) -> None:
        family, spec = read_spec(checkpoint)
        self._plain = CheckpointWeights(checkpoint)
        self.sites = self._plain.sites
        self.dtype = dtype
        self.device = device
        stored = StoredWeights(NamedTensors(checkpoint, family.names))
        self._matrices = Matrices(stored, policy, dtype=dtype, device=device, kernels=REFERENCE)
        self._layout = lay_out(spec, family.names)
        layers = (*self._layout.linears(), self._layout.head)
        self._modules = {module.path: (module, layer) for layer in layers for module in layer.modules}
        self._slots = {layer.slot: layer for layer in layers}

    def linear(self, path: str) -> Weight:
        sites = self.sites
        if path == sites.head_path and sites.tied_head:
            return self._table()
        if path not in self._modules:
            # One of a stack of experts: several modules of the file, and a layer of its own.
            return self._matrices.linear(self._slots[sites.matrices[path].slot])
        module, layer = self._modules[path]
        own = LinearLayout(slot=layer.slot, modules=(module,), in_features=layer.in_features)
        return self._matrices.head(own) if path == sites.head_path else self._matrices.linear(own)

    def bias(self, path: str) -> Tensor | None:
        bias = self._plain.bias(path)
        return None if bias is None else self._cast(bias)

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._plain.norm(path)
        return self._cast(weight), None if bias is None else self._cast(bias)

    def embedding(self) -> Tensor:
        return self._table().dequantize()

    def _table(self) -> Weight:
        path = self.sites.embedding_path
        head = self._layout.head if self.sites.tied_head else None
        return self._matrices.table(path, self._layout.tables[path], head=head)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)
