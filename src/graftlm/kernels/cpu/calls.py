"""What the wrappers of all C++ functions need: dtype codes, addresses, and which tensors they take."""

from __future__ import annotations

import torch
from torch import Tensor

# As csrc/graft.h counts them.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def takes(*tensors: Tensor) -> bool:
    """Whether all tensors are on the CPU, of one dtype that the library knows, and need no gradient."""
    dtype = tensors[0].dtype
    return dtype in DTYPE_CODES and all(
        tensor.dtype == dtype and tensor.device.type == "cpu" and not tensor.requires_grad for tensor in tensors
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
