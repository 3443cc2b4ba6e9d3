"""A GGUF file under llama.cpp's own names: metadata and tensors, as they are stored or as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from graftlm.checkpoint.gguf_header import read_header
from graftlm.errors import CheckpointError

# Types whose rows are plain numbers; all others are blocks.
PLAIN_DTYPES = {
    gguf.GGMLQuantizationType.F64: torch.float64,
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFFile:
    """One GGUF file, memory-mapped. In keys, `{arch}` stands for the architecture's name.

    Raises:
        CheckpointError: it is not a readable GGUF file, or one part of several.
    """

    def __init__(self, path: Path) -> None:
        try:
            # An empty file cannot be mapped.
            self._data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
        except OSError as cause:
            raise CheckpointError(f"{path.name} cannot be read", got=str(cause)[:200]) from cause
        header = read_header(self._data.data, path.name)
        self.name = path.name
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = header.tensors
        self.architecture = str(self.metadata.get("general.architecture"))
        if (parts := self.metadata.get("split.count", 1)) != 1:
            raise CheckpointError(
                f"{path.name} is one part of a model in several files",
                got=f"split.count {parts}",
                do="join them with llama-gguf-split --merge",
            )

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        return self.metadata.get(self._full(key), default)

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise CheckpointError("the GGUF file lacks a metadata key", got=self._full(key))
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; lists, one value per layer, are not supported.

        Raises:
            CheckpointError: the key is absent without a default, or holds something else.
        """
        value = self.required(key) if default is None else self.field(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._full(key)} in the GGUF file is not a positive integer", got=repr(value)[:100]
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            CheckpointError: the key is absent without a default, or holds something else.
        """
        value = self.required(key) if default is None else self.field(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{self._full(key)} in the GGUF file is not a positive number", got=repr(value)[:100])
        return float(value)

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Slowest dimension first: [out, in] for a matrix."""
        return self._tensors[name].shape

    def rows(self, name: str) -> int | None:
        """Rows of a matrix, or of each in a stack of them; None where there is none."""
        return self.shape(name)[-2] if name in self._tensors and len(self.shape(name)) > 1 else None

    def are_alike(self, name: str, other: str) -> bool:
        """Whether both tensors are there, of one shape and type."""
        entries = [self._tensors.get(name), self._tensors.get(other)]
        first, second = ((entry.shape, entry.type) if entry is not None else None for entry in entries)
        return first is not None and first == second

    def block_type(self, name: str) -> str | None:
        """ggml's name of a tensor's quantised type; None where it is stored as plain numbers."""
        kind = self._tensors[name].type
        return None if kind in PLAIN_DTYPES else str(kind.name)

    def read_stored(self, name: str, expert: int | None = None) -> Tensor:
        """A copy of a tensor as it is stored: plain numbers in their dtype, blocks as rows of bytes, uint8. Of a tensor
        that holds the matrices of all experts, `expert` takes one."""
        stored = torch.from_numpy(self._rows(name, expert).copy())
        dtype = PLAIN_DTYPES.get(self._tensors[name].type)
        return stored if dtype is None else stored.view(dtype)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A copy of a tensor, or of one expert's part of it, in float32.

        Raises:
            CheckpointError: the gguf package cannot dequantise its type.
        """
        if self.block_type(name) is None:
            return self.read_stored(name, expert).float()
        kind = self._tensors[name].type
        try:
            values = dequantize(self._rows(name, expert), kind)
        except NotImplementedError as cause:
            raise CheckpointError(
                f"tensor {name} has a type the gguf package cannot dequantise", got=kind.name
            ) from cause
        return torch.from_numpy(values)

    def close(self) -> None:
        """Forget the file. Tensors already read stay valid."""
        self._data = np.empty(0, dtype=np.uint8)

    def _rows(self, name: str, expert: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        entry = self._tensors[name]
        data = self._data[entry.start : entry.start + entry.num_bytes]
        rows: np.ndarray[Any, np.dtype[np.uint8]] = data.reshape(*entry.shape[:-1], entry.row_bytes)
        return rows if expert is None else rows[expert]

    def _full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)
