"""The tensors of one module in a file, read with their shape and dtype checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.stored_tensor import stored_shape


class StoredModule:
    """The tensors `<path>.<role>` of a file. What is read lies on `device`."""

    def __init__(self, tensors: StoredTensors, path: str, device: torch.device) -> None:
        self.path = path
        self.device = device
        self._tensors = tensors

    def name(self, role: str) -> str:
        return f"{self.path}.{role}"

    def has(self, role: str) -> bool:
        return self.name(role) in self._tensors.tensor_names()

    def shape(self, role: str) -> tuple[int, ...]:
        """
        Raises:
            CheckpointError: there is no such tensor.
        """
        return stored_shape(self._tensors, self.name(role))

    def read(
        self, role: str, *, dtypes: Collection[torch.dtype], shapes: Collection[tuple[int, ...]] | None = None
    ) -> Tensor:
        """A tensor. Any shape will do where `shapes` is None.

        Raises:
            CheckpointError: it is missing, or has another shape or dtype.
        """
        shape = self.shape(role)
        if shapes is not None and shape not in shapes:
            raise self.misshapen(role, " or ".join(map(_text, dict.fromkeys(shapes))))
        tensor = self._tensors.read_stored(self.name(role))
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {self.name(role)} has the wrong dtype",
                got=_dtype_name(tensor.dtype),
                allowed=", ".join(sorted(map(_dtype_name, dtypes))),
            )
        return tensor.to(self.device)

    def misshapen(self, role: str, allowed: str) -> CheckpointError:
        """The error that says so."""
        return CheckpointError(
            f"tensor {self.name(role)} has the wrong shape", got=_text(self.shape(role)), allowed=allowed
        )


def present_names(tensors: StoredTensors, path: str, roles: Iterable[str]) -> frozenset[str]:
    """The names of those tensors `<path>.<role>` that are in the file."""
    return tensors.tensor_names() & {f"{path}.{role}" for role in roles}


def _text(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
