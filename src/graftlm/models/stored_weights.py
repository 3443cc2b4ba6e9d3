"""A model's matrices as its checkpoint stores them: quantised in some format, or plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.models.layout import ModuleLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.tensors import NamedTensors
from graftlm.quantization import Weight
from graftlm.quantization.methods import read_quantization_config


def stored_quantization(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """A checkpoint's `quantization_config`; None where it has none, or promises what the tensors lack: they count.

    Raises:
        CheckpointError: the model is not supported, or a value in the config is refused.
    """
    if checkpoint.quantization_config is None:
        return None
    family, spec = read_spec(checkpoint)
    stored = StoredWeights(NamedTensors(checkpoint, family.names))
    modules = lay_out(spec, family.names).matrices()
    return checkpoint.quantization_config if any(stored.is_quantized(module.path) for module, _ in modules) else None


class StoredWeights:
    """Reads matrices by module. Which modules are quantised is decided by the tensors that are there, one by one.

    Raises:
        CheckpointError: a `quantization_config` that is unknown or refused.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors
        config = tensors.checkpoint.quantization_config
        self._format = None if config is None else read_quantization_config(config)

    @property
    def has_format(self) -> bool:
        """Whether the checkpoint says that matrices may be quantised."""
        return self._format is not None

    def is_quantized(self, path: str) -> bool:
        """Whether the matrix of the module `path` is stored in the checkpoint's quantised format."""
        return self._format is not None and self._format.stores(
            self._tensors.checkpoint, self._tensors.stored_path(path)
        )

    def tensor_names(self, path: str) -> frozenset[str]:
        """Every tensor in the file that is part of a quantised matrix, by its name there."""
        if self._format is None:
            return frozenset()
        return self._format.tensor_names(self._tensors.checkpoint, self._tensors.stored_path(path))

    def quantized(self, module: ModuleLayout, in_features: int, *, dtype: torch.dtype, device: torch.device) -> Weight:
        """A matrix that `is_quantized`, as it is stored. dtype: the compute dtype.

        Raises:
            CheckpointError: tensors are missing, misshapen or of the wrong dtype; the message names them.
        """
        if self._format is None:
            raise KeyError(module.path)
        return self._format.read(
            self._tensors.checkpoint,
            self._tensors.stored_path(module.path),
            shape=(module.rows, in_features),
            dtype=dtype,
            device=device,
            parts=module.parts,
        )

    def full(self, module: ModuleLayout, in_features: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A matrix [out, in] in full precision. Unless it had to be dequantised it is a view of the file, in the file's
        dtype and on the CPU."""
        if self.is_quantized(module.path):
            return self.quantized(module, in_features, dtype=dtype, device=device).dequantize()
        matrix = self._tensors.read(module.tensor("weight"))
        if module.stack is not None:
            matrix = matrix[module.stack.index]
        return matrix.t() if module.transposed else matrix
