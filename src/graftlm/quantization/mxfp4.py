"""GPT-OSS checkpoints in MXFP4: the experts of a layer in two tensors for each of their matrices.

For E experts of [N, K]: NAME_blocks uint8 [E, N, K / 32, 16], two four-bit floats to a byte, the even column in the low
half; NAME_scales uint8 [E, N, K / 32], exponents of two, 127 more than they mean. w = e2m1(code) * 2**(scale - 127)

Source: transformers 5, integrations/mxfp4.py, convert_moe_packed_tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.scaled_e2m1 import ScaledE2M1
from graftlm.quantization.stored_tensor import read_stored_tensor, stored_shape

GROUP = 32
BLOCK_BYTES = GROUP // 2
# Blocks and scales of an expert's two matrices.
NUM_SHARED = 4


class MXFP4Format:
    """A `WeightFormat`. An expert's matrix has the path of the stack, a dot and the expert's index.

    config: quantization_config of quant_method mxfp4. What it says is not quantised has other tensors.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # The experts of a layer are read one by one, and share the memory of one copy.
        self._shared: dict[str, Tensor] = {}

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        stack, _, index = path.rpartition(".")
        return index.isdecimal() and f"{stack}_blocks" in tensors.tensor_names()

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        stack = path.rpartition(".")[0]
        return tensors.tensor_names() & {f"{stack}_blocks", f"{stack}_scales"}

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> ScaledE2M1:
        stack, _, index = path.rpartition(".")
        rows, columns = shape
        count = _count(tensors, stack)
        if columns % GROUP or not int(index) < count:
            raise CheckpointError(
                f"tensor {stack}_blocks cannot hold this expert's matrix",
                got=f"expert {index} of {count}, {rows} x {columns}",
                allowed=f"columns in groups of {GROUP}",
            )
        groups = columns // GROUP
        blocks = self._read(tensors, f"{stack}_blocks", (count, rows, groups, BLOCK_BYTES), device)[int(index)]
        scales = self._read(tensors, f"{stack}_scales", (count, rows, groups), device)[int(index)]
        return ScaledE2M1(
            codes=PackedCodes.from_bytes(blocks.view(rows, groups * BLOCK_BYTES), columns, 4),
            scale=scales.view(torch.float8_e8m0fnu),
            global_scale=torch.ones(1, device=device),
            columns=ColumnGroups(columns=columns, size=GROUP),
            dtype=dtype,
        )

    def _read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if name not in self._shared:
            while len(self._shared) >= NUM_SHARED:
                del self._shared[next(iter(self._shared))]
            self._shared[name] = read_stored_tensor(tensors, name, shape=shape, dtype=torch.uint8).to(device)
        return self._shared[name]


def _count(tensors: StoredTensors, stack: str) -> int:
    """The number of experts: that of their biases, where they have some, which is compared with the config's."""
    bias = f"{stack}_bias"
    return stored_shape(tensors, bias if bias in tensors.tensor_names() else f"{stack}_blocks")[0]
