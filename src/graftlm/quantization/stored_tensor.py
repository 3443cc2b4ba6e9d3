"""One tensor of a stored format, checked before anything relies on its size."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.format import StoredTensors


def read_stored_tensor(tensors: StoredTensors, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor `name`, which must have this shape and dtype.

    Raises:
        CheckpointError: it is missing or has another; the message names it.
    """
    if stored_shape(tensors, name) != shape:
        raise CheckpointError(
            f"tensor {name} has the wrong shape", got=list(tensors.shape(name)), allowed=str(list(shape))
        )
    tensor = tensors.read_stored(name)
    if tensor.dtype != dtype:
        raise CheckpointError(f"tensor {name} has the wrong dtype", got=tensor.dtype, allowed=str(dtype))
    return tensor


def stored_shape(tensors: StoredTensors, name: str) -> tuple[int, ...]:
    """The shape of the tensor `name`.

    Raises:
        CheckpointError: it is missing.
    """
    if name not in tensors.tensor_names():
        raise CheckpointError(f"tensor {name} is missing", do="fetch the checkpoint again; its weights are incomplete")
    return tensors.shape(name)
