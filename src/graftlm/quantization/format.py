"""How checkpoints store weights: what a format's tensors are called, and how they become a `Weight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from graftlm.quantization.weight import Weight


class StoredTensors(Protocol):
    """The tensors of a file as they are stored, whatever their dtype."""

    def tensor_names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_stored(self, name: str) -> Tensor:
        """A tensor in its stored dtype. The caller must not write to it."""
        ...


class WeightFormat(Protocol):
    """One way to store a linear module's matrix. Which modules use it is decided by the tensors that are there, never
    by a config's skip list: those are matched differently by every library."""

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        """Whether the matrix of the module `path` is stored in this format."""
        ...

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        """All tensors in the file that make up that matrix; the bias is not among them."""
        ...

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> Weight:
        """The matrix.

        Args:
            shape: (out, in), what the model's config asks for.
            dtype: the compute dtype: that of `dequantize()` and of the inputs `matmul` will get.
            parts: rows of each matrix that the checkpoint has fused into this one, in order; empty where none were. It
                matters to formats that may have a scale for each.

        Raises:
            CheckpointError: tensors are missing, misshapen, or of the wrong dtype; the message names them.
        """
        ...


class StorableWeight(Weight, Protocol):
    """A `Weight` that can be saved in a checkpoint."""

    def stored_tensors(self) -> dict[str, Tensor]:
        """What its format stores, by name after the module's path and a dot: `WeightFormat.read` turned round. The
        tensors share this weight's memory."""
        ...


class Quantizer(Protocol):
    """Makes a quantised weight of a full-precision one."""

    def quantize(self, matrix: Tensor, *, dtype: torch.dtype) -> StorableWeight:
        """matrix: [out, in], any float dtype. dtype: the compute dtype, as in `WeightFormat.read`."""
        ...


class FormatReader(Protocol):
    """From config.json's `quantization_config` to the format it describes."""

    def __call__(self, config: Mapping[str, Any]) -> WeightFormat:
        """
        Raises:
            CheckpointError: a value that is unknown or refused, by name.
        """
        ...
