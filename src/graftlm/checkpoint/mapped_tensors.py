"""The tensors of one safetensors file, mapped into memory: read when used, shared with whoever maps them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftlm.errors import CheckpointError


class MappedTensors:
    """For files that nobody writes to once they have their name: `read_stored` gives views of the file, which outlive
    its name but not its being cut short.

    Raises:
        CheckpointError: it is no readable safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as cause:
            raise CheckpointError(f"{path.name} is not a readable safetensors file", got=str(cause)[:200]) from cause
        self._file = file
        self._names: frozenset[str] = frozenset(file.keys())

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read_stored(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor
