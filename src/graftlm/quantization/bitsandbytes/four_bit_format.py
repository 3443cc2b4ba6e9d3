"""Reading 4-bit matrices as bitsandbytes and transformers store them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes.block_scales import BlockScales, NestedScales, PlainScales
from graftlm.quantization.bitsandbytes.code_tables import FourBitType
from graftlm.quantization.bitsandbytes.four_bit_weight import FourBitWeight
from graftlm.quantization.bitsandbytes.quant_state import QUANT_TYPES, STORAGE_DTYPES, TENSOR_NAMES, QuantState
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.stored_tensor import read_stored_tensor, stored_shape

_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *TENSOR_NAMES.values())


class FourBitFormat:
    """A `WeightFormat` for NF4 and FP4."""

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        names = tensors.tensor_names()
        return any(f"{path}.weight.{part}" in names for part in _PARTS)

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        candidates = {f"{path}.weight", *(f"{path}.weight.{part}" for part in _PARTS)}
        return tensors.tensor_names() & candidates

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> FourBitWeight:
        state = _read_state(tensors, path, shape)
        num_elements = shape[0] * shape[1]
        codes = _read_codes(tensors, f"{path}.weight", num_bytes=-(-num_elements // 2))
        return FourBitWeight(
            shape=shape,
            codes=codes.to(device),
            scales=_read_scales(tensors, path, state, -(-num_elements // state.block_size), device),
            table=_read_table(tensors, f"{path}.weight.quant_map", 16).to(device),
            quant_type=state.quant_type,
            block_size=state.block_size,
            dtype=dtype,
        )


def _read_state(tensors: StoredTensors, path: str, shape: tuple[int, int]) -> QuantState:
    present = [kind for kind in QUANT_TYPES if f"{path}.weight.{TENSOR_NAMES[kind]}" in tensors.tensor_names()]
    if len(present) != 1:
        raise CheckpointError(
            f"{path}.weight is quantised to 4 bits and does not say how",
            got=f"{len(present)} quant_state tensors",
            allowed=f"one of {', '.join(f'{path}.weight.{name}' for name in TENSOR_NAMES.values())}",
        )
    quant_type: FourBitType = present[0]
    name = f"{path}.weight.{TENSOR_NAMES[quant_type]}"
    length = math.prod(tensors.shape(name))
    text = read_stored_tensor(tensors, name, shape=(length,), dtype=torch.uint8)
    return QuantState.parse(text.numpy(force=True).tobytes(), name, quant_type=quant_type, shape=shape)


def _read_codes(tensors: StoredTensors, name: str, *, num_bytes: int) -> Tensor:
    stored_shape(tensors, name)
    codes = tensors.read_stored(name)
    if codes.dtype not in STORAGE_DTYPES.values():
        raise CheckpointError(
            f"tensor {name} has the wrong dtype for 4-bit codes", got=codes.dtype, allowed=", ".join(STORAGE_DTYPES)
        )
    if codes.nbytes != num_bytes:
        raise CheckpointError(
            f"tensor {name} has the wrong size for 4-bit codes",
            got=f"{list(codes.shape)} of {codes.dtype}, {codes.nbytes} bytes",
            allowed=f"{num_bytes} bytes",
        )
    return codes.reshape(-1).view(torch.uint8)


def _read_scales(
    tensors: StoredTensors, path: str, state: QuantState, num_blocks: int, device: torch.device
) -> BlockScales:
    name = f"{path}.weight.absmax"
    if state.nested is None:
        return PlainScales(
            absmax=read_stored_tensor(tensors, name, shape=(num_blocks,), dtype=torch.float32).to(device)
        )
    num_groups = -(-num_blocks // state.nested.block_size)
    absmax = read_stored_tensor(tensors, f"{path}.weight.nested_absmax", shape=(num_groups,), dtype=torch.float32)
    return NestedScales(
        codes=read_stored_tensor(tensors, name, shape=(num_blocks,), dtype=torch.uint8).to(device),
        table=_read_table(tensors, f"{path}.weight.nested_quant_map", 256).to(device),
        absmax=absmax.to(device),
        offset=state.nested.offset,
        block_size=state.nested.block_size,
    )


def _read_table(tensors: StoredTensors, name: str, length: int) -> Tensor:
    table = read_stored_tensor(tensors, name, shape=(length,), dtype=torch.float32)
    if not table.isfinite().all():
        raise CheckpointError(
            f"tensor {name} holds values that are not numbers", got=table[~table.isfinite()][0].item()
        )
    return table
