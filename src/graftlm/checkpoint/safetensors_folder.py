"""Hugging Face model folders: config.json beside one or several safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graftlm.checkpoint.file_identity import FileIdentity
from graftlm.checkpoint.json_file import read_json_object
from graftlm.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Where AutoGPTQ and AutoAWQ wrote what newer versions put into config.json, and the quant_method that is missing there.
OWN_CONFIG_NAMES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Pages of a mapped file that were read count as resident memory until the file is unmapped.
REMAP_BYTES = 64 << 20
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class SafetensorsCheckpoint:
    """A `Checkpoint` over a folder. Tensors are memory-mapped: nothing is read before it is asked for, and what was is
    unmapped soon after its last tensor is gone."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError("the model folder has no config.json", got=folder)
        self.config: Mapping[str, Any] = read_json_object(folder / "config.json", CheckpointError)
        self.quantization_config: Mapping[str, Any] | None = _quantization_config(folder, self.config)
        generation = folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json_object(generation, CheckpointError) if generation.is_file() else {}
        )
        self.tokenizer_source: Path | Mapping[str, Any] = folder
        self._folder = folder
        paths = [folder / name for name in _weight_files(folder)]
        self.weight_files: Mapping[Path, FileIdentity] = {path: FileIdentity.of(path) for path in paths}
        self._files = {path.name: _open(path) for path in paths}
        self._bytes_read = dict.fromkeys(self._files, 0)
        self._file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (safe_open objects are not mappings)
                if name in self._file_of:
                    raise CheckpointError(f"tensor {name} is in two files", got=f"{self._file_of[name]}, {file_name}")
                self._file_of[name] = file_name
        self._names = frozenset(self._file_of)
        self.dtype: str = str(self.config.get("dtype") or self.config.get("torch_dtype") or self._stored_dtype())

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        file_name = self._file_of[name]
        tensor: Tensor = self._files[file_name].get_tensor(name)
        self._bytes_read[file_name] += tensor.nbytes
        if self._bytes_read[file_name] >= REMAP_BYTES:
            # The old mapping goes with the last tensor that was read through it.
            self._files[file_name] = _open(self._folder / file_name)
            self._bytes_read[file_name] = 0
        if tensor.dtype not in WEIGHT_DTYPES:
            # Codes of some quantisation: as numbers they mean nothing.
            raise CheckpointError(
                f"tensor {name} is not stored as plain numbers",
                got=str(tensor.dtype).removeprefix("torch."),
                allowed=", ".join(DTYPE_NAMES.values()),
            )
        return tensor

    def read_stored(self, name: str) -> Tensor:
        # Copied: a file that is later truncated cannot hurt.
        stored: Tensor = self._files[self._file_of[name]].get_tensor(name).clone()
        return stored

    def close(self) -> None:
        self._files.clear()

    def _stored_dtype(self) -> str:
        """The widest dtype among the tensors."""
        stored = {str(self._files[file].get_slice(name).get_dtype()) for name, file in self._file_of.items()}
        return next((name for code, name in DTYPE_NAMES.items() if code in stored), "float32")


def _quantization_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's, or that of a file beside it."""
    inside = config.get("quantization_config")
    if inside is None:
        for name, method in OWN_CONFIG_NAMES.items():
            if (folder / name).is_file():
                return {"quant_method": method, **read_json_object(folder / name, CheckpointError)}
    elif not isinstance(inside, dict):
        raise CheckpointError("config.json: quantization_config is not an object", got=repr(inside)[:100])
    return inside


def _weight_files(folder: Path) -> list[str]:
    """Names of the weight files. Where both forms lie, the single file counts, as in transformers."""
    if (folder / SINGLE_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        names = [SINGLE_NAME]
    else:
        names = _indexed_files(folder / INDEX_NAME)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError("the model folder lacks weight files", got=f"missing {', '.join(missing)}")
    return names


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_NAME} has no weight_map", got=type(weight_map).__name__)
    outside = sorted({str(name) for name in weight_map.values() if not _is_plain_file_name(name)})
    if outside:
        raise CheckpointError(f"{INDEX_NAME} names files outside the folder", got=", ".join(outside)[:200])
    return sorted(set(weight_map.values()))


def _is_plain_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and "\0" not in name


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(f"{path.name} is not a readable safetensors file", got=str(cause)[:200]) from cause
