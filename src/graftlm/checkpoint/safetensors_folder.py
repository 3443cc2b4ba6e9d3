"""Hugging Face model folders: config.json beside one or several safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftlm.checkpoint.json_file import read_json_object
from graftlm.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsCheckpoint:
    """A `Checkpoint` over a folder. Tensors are memory-mapped; nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError("the model folder has no config.json", got=folder)
        self.config: Mapping[str, Any] = read_json_object(folder / "config.json", CheckpointError)
        generation = folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json_object(generation, CheckpointError) if generation.is_file() else {}
        )
        self.tokenizer_files: tuple[Path, str | None] = (folder, None)
        self._files = {name: _open(folder / name) for name in _weight_files(folder)}
        self._file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (safe_open objects are not mappings)
                if name in self._file_of:
                    raise CheckpointError(f"tensor {name} is in two files", got=f"{self._file_of[name]}, {file_name}")
                self._file_of[name] = file_name
        self.dtype: str = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files.clear()


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX_NAME).is_file():
        index = read_json_object(folder / INDEX_NAME, CheckpointError)
        names = sorted(set(index.get("weight_map", {}).values()))
    else:
        names = [SINGLE_NAME]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            "the model folder lacks weight files", got=f"missing {', '.join(missing) or INDEX_NAME + ' entries'}"
        )
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{INDEX_NAME} names files outside the folder", got=", ".join(outside))
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(f"{path.name} is not a readable safetensors file", got=str(cause)[:200]) from cause
