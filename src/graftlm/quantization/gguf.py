"""Weights in the blocks of a GGUF file: kept as the file stores them, dequantised where they are used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.column_part import dense_columns
from graftlm.quantization.dequantized import dequantized_matmul
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.gguf_blocks import BLOCK_TYPES, BlockType
from graftlm.quantization.weight import Weight

logger = logging.getLogger(__name__)


class GGUFWeight:
    """A `Weight` of quantised blocks. A row is a whole number of blocks, so any rows are a gather of bytes.

    Args:
        packed: [out, in / block_type.weights * block_type.num_bytes] uint8.
        dtype: the compute dtype.
    """

    def __init__(self, packed: Tensor, block_type: BlockType, *, dtype: torch.dtype) -> None:
        self._packed = packed
        self._block_type = block_type
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self._packed.shape
        return rows, row_bytes // self._block_type.num_bytes * self._block_type.weights

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    @property
    def format(self) -> str:
        return self._block_type.name

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dequantized_matmul(self, x, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._unpacked(self._packed[ids])

    def part(self, start: int, stop: int) -> GGUFWeight:
        return GGUFWeight(self._packed[start:stop], self._block_type, dtype=self._dtype)

    def column_part(self, start: int, stop: int) -> Weight:
        size, num_bytes = self._block_type.weights, self._block_type.num_bytes
        if start % size or stop % size:
            return dense_columns(self, start, stop)
        packed = self._packed[:, start // size * num_bytes : stop // size * num_bytes].contiguous()
        return GGUFWeight(packed, self._block_type, dtype=self._dtype)

    def dequantize(self) -> Tensor:
        return self._unpacked(self._packed)

    def grouped_codes(self) -> GroupedCodes:
        return self._codes(self._packed)

    def _unpacked(self, packed: Tensor) -> Tensor:
        return self._codes(packed).decode().to(self._dtype)

    def _codes(self, packed: Tensor) -> GroupedCodes:
        blocks = packed.reshape(-1, self._block_type.num_bytes)
        return self._block_type.codes(blocks).joined(self.shape[1] // self._block_type.weights)


class GGUFFormat:
    """The `WeightFormat` of one GGUF file.

    Args:
        block_types: each quantised matrix's block type, by the matrix's name.
    """

    def __init__(self, block_types: Mapping[str, BlockType]) -> None:
        self._block_types = block_types

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return f"{path}.weight" in self._block_types

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return frozenset({f"{path}.weight"})

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> GGUFWeight:
        """As `WeightFormat.read`. The stored bytes are those of the matrix [out, in], also where transformers writes
        the transposed one (GPT-2)."""
        name = f"{path}.weight"
        block_type = self._block_types[name]
        packed = tensors.read_stored(name)
        blocks, rest = divmod(shape[1], block_type.weights)
        if rest or packed.dtype != torch.uint8 or packed.shape != (shape[0], blocks * block_type.num_bytes):
            raise CheckpointError(
                f"{name} does not hold {block_type.name} blocks of a {shape[0]} x {shape[1]} matrix",
                got=f"{str(packed.dtype).removeprefix('torch.')} {list(packed.shape)}",
                allowed=f"rows of blocks, {block_type.num_bytes} bytes for {block_type.weights} weights",
            )
        return GGUFWeight(packed.to(device), block_type, dtype=dtype)


def read_gguf_format(config: Mapping[str, Any]) -> GGUFFormat:
    """A `FormatReader` of what a GGUF checkpoint says in place of config.json's `quantization_config`: under
    "block_types", the type of every quantised matrix by name. Types that are not kept quantised are not in the format,
    so that those matrices are read in full; one log line names them."""
    types: Mapping[str, str] = config["block_types"]
    others = Counter(kind for kind in types.values() if kind not in BLOCK_TYPES)
    if others:
        listed = ", ".join(f"{count} of type {kind}" for kind, count in sorted(others.items()))
        logger.warning("GGUF matrices dequantised in memory: %s", listed)
    return GGUFFormat({name: BLOCK_TYPES[kind] for name, kind in types.items() if kind in BLOCK_TYPES})
