"""Reading int8 matrices as bitsandbytes and transformers store them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes.eight_bit_weight import EightBitWeight
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.stored_tensor import read_stored_tensor


class EightBitFormat:
    """A `WeightFormat` for int8 with a scale per row."""

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return f"{path}.SCB" in tensors.tensor_names()

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return tensors.tensor_names() & {f"{path}.weight", f"{path}.SCB", f"{path}.weight_format"}

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> EightBitWeight:
        _require_row_layout(tensors, f"{path}.weight_format")
        codes = read_stored_tensor(tensors, f"{path}.weight", shape=shape, dtype=torch.int8)
        absmax = read_stored_tensor(tensors, f"{path}.SCB", shape=shape[:1], dtype=torch.float32)
        return EightBitWeight(codes=codes.to(device), absmax=absmax.to(device), dtype=dtype)


def _require_row_layout(tensors: StoredTensors, name: str) -> None:
    # Where the tensor is absent bitsandbytes takes the codes to lie by rows.
    if name not in tensors.tensor_names():
        return
    layout = read_stored_tensor(tensors, name, shape=(), dtype=torch.uint8).item()
    if layout != 0:
        raise CheckpointError(
            f"tensor {name} says the codes are tiled for one GPU's kernels",
            got=layout,
            allowed="0, codes by row",
            do="save the model again with a current bitsandbytes",
        )
