"""Finding and reading an adapter's files. Nothing here is trusted: sizes are checked before memory is taken, pickles
are refused, and no file of the folder is ever executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from graftlm.checkpoint.hub import download, is_hub_id
from graftlm.checkpoint.json_file import parse_json_object
from graftlm.errors import AdapterCorrupt, AdapterFilesNotFound, AdapterMemoryExceeded, AdapterUnsupported

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
HUB_FILES = (CONFIG_NAME, SAFETENSORS_NAME, PICKLE_NAME)
MAX_CONFIG_BYTES = 4 << 20
MAX_TENSOR_NAME_LEN = 500
# safetensors' own limit on the JSON header.
MAX_HEADER_BYTES = 100_000_000
# What torch's weights-only unpickler raises on files that are damaged or hold more than weights.
PICKLE_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """An adapter as read from disk.

    tensors: the file's own names and dtypes, on the CPU.
    digest: SHA-256 of config and weights. weights_path: the file with the weights, beside its config.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    weights_path: Path


def find_adapter(source: str | Path) -> tuple[Path, Path]:
    """Paths of config and weights. `source` is a folder, the weights file itself, or a hub id; a path that exists is
    always local.

    Raises:
        AdapterFilesNotFound: says which file was looked for.
    """
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return _require(path.parent / CONFIG_NAME), path
        if not path.exists() and is_hub_id(source):
            path = download(str(source), HUB_FILES, AdapterFilesNotFound)
        return _find_in_folder(path, source)
    except (OSError, RuntimeError, ValueError) as cause:
        if isinstance(cause, AdapterFilesNotFound):
            raise
        # A name that is too long, a user that does not exist, a folder that may not be read.
        raise AdapterFilesNotFound("this path cannot be opened", got=_shown(source), do=str(cause)[:100]) from cause


def folder_bytes(source: str | Path) -> int | None:
    """Size of all files in a local adapter's folder, its tokenizer's too; None when it cannot be seen."""
    try:
        path = Path(source).expanduser()
        with os.scandir(path if path.is_dir() else path.parent) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except (OSError, RuntimeError, ValueError):
        return None


def _find_in_folder(path: Path, source: str | Path) -> tuple[Path, Path]:
    if not path.is_dir():
        raise AdapterFilesNotFound(
            "no such adapter", got=_shown(source), allowed="a folder saved by PEFT, or its weights file"
        )
    config = _require(path / CONFIG_NAME)
    for name in (SAFETENSORS_NAME, PICKLE_NAME):
        if (path / name).is_file():
            return config, path / name
    raise AdapterFilesNotFound(
        "the adapter folder has no weights", got=path.name, allowed=f"{SAFETENSORS_NAME} beside {CONFIG_NAME}"
    )


def read_adapter_files(source: str | Path, *, max_bytes: int, allow_pickle: bool) -> AdapterFiles:
    """Read an adapter's config and weights.

    Args:
        max_bytes: larger weight files are refused before they are read.
        allow_pickle: admit `.bin` files, through torch's weights-only unpickler.

    Raises:
        AdapterFilesNotFound, AdapterCorrupt, AdapterUnsupported, AdapterMemoryExceeded
    """
    config_path, weights_path = find_adapter(source)
    # Each file is read once, so that digest and adapter are of the same bytes even if one is replaced meanwhile.
    try:
        _check_sizes(config_path, weights_path, max_bytes)
        config_content, content = config_path.read_bytes(), weights_path.read_bytes()
    except OSError as cause:
        raise AdapterFilesNotFound("the adapter's files cannot be read", got=str(cause)[:200]) from cause
    config = parse_json_object(config_content, config_path.name, AdapterCorrupt)
    digest = _digest(config_content, content)
    if weights_path.suffix == ".bin":
        tensors = _parse_pickle(content, weights_path.name, allow_pickle)
    else:
        tensors = _parse_safetensors(content, weights_path.name)
    _check_tensor_names(tensors, weights_path.name)
    return AdapterFiles(config=config, tensors=tensors, digest=digest, weights_path=weights_path.absolute())


def _check_tensor_names(tensors: Mapping[str, Tensor], file_name: str) -> None:
    """Names go into messages and logs."""
    for name in tensors:
        if len(name) > MAX_TENSOR_NAME_LEN or not name.isprintable():
            raise AdapterCorrupt(
                f"{file_name} has a tensor name that cannot be one",
                got=ascii(name[:80]),
                allowed=f"at most {MAX_TENSOR_NAME_LEN} printable characters",
            )


def _digest(config_content: bytes, content: bytes) -> str:
    # Piece by piece: joining them would copy the weights, and keep every other thread from running meanwhile.
    digest = hashlib.sha256(config_content)
    digest.update(b"\0")
    digest.update(content)
    return digest.hexdigest()


def _shown(source: object) -> str:
    """A path as it may stand in a message: paths can be long, and hold bytes that are not text."""
    return repr(str(source))[:200]


def _check_sizes(config: Path, weights: Path, max_bytes: int) -> None:
    if (size := config.stat().st_size) > MAX_CONFIG_BYTES:
        raise AdapterCorrupt(f"{CONFIG_NAME} is too large", got=f"{size} bytes", allowed=f"{MAX_CONFIG_BYTES} bytes")
    if (size := weights.stat().st_size) > max_bytes:
        raise AdapterMemoryExceeded(
            "the adapter's weights are larger than adapter_memory_bytes",
            got=f"{size} bytes",
            allowed=f"{max_bytes} bytes",
            do="raise adapter_memory_bytes",
        )


def _require(config: Path) -> Path:
    if not config.is_file():
        raise AdapterFilesNotFound(f"there is no {CONFIG_NAME} beside the weights", got=config.parent.name)
    return config


def _parse_safetensors(content: bytes, name: str) -> dict[str, Tensor]:
    header = _safetensors_header(content, name)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
        json.loads(header, object_pairs_hook=_without_duplicates)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError, TypeError) as cause:
        raise AdapterCorrupt(f"{name} is damaged", got=str(cause)[:200]) from cause
    return tensors


def _safetensors_header(content: bytes, name: str) -> bytes:
    """The JSON part; or an error that says in words what a file is that is not safetensors."""
    header_bytes = int.from_bytes(content[:8], "little")
    if 0 < header_bytes <= min(MAX_HEADER_BYTES, len(content) - 8) and content[8:9] == b"{":
        return content[8 : 8 + header_bytes]
    if content[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise AdapterCorrupt(
            f"{name} is not a safetensors file: it looks like a pickle or zip, as torch.save writes",
            do="save the adapter with safetensors",
        )
    if content.startswith(b"version https://git-lfs"):
        raise AdapterCorrupt(f"{name} is a Git LFS pointer, not the weights", do="fetch the file with git lfs pull")
    raise AdapterCorrupt(f"{name} is not a complete safetensors file", got=f"{len(content)} bytes")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key stands twice in the header")
    return unique


def _parse_pickle(content: bytes, name: str, allow_pickle: bool) -> dict[str, Tensor]:
    if not allow_pickle:
        raise AdapterUnsupported(
            f"{name} is a pickle, which can carry code",
            allowed=SAFETENSORS_NAME,
            do="convert it to safetensors, or allow .bin files explicitly (allow_pickle); it is then read weights-only",
        )
    try:
        _refuse_compression(content)
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except PICKLE_ERRORS as cause:
        raise AdapterCorrupt(f"{name} cannot be read weights-only", got=str(cause)[:200]) from cause
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise AdapterCorrupt(f"{name} is not a dictionary of tensors")
    for key, value in loaded.items():
        # A view can claim any shape over a few bytes; a tensor on another device has no values.
        if value.layout != torch.strided or value.device.type != "cpu" or value.nbytes > len(content):
            raise AdapterCorrupt(f"tensor {str(key)[:200]} in {name} is not a plain tensor")
    return {str(key): value for key, value in loaded.items()}


def _refuse_compression(content: bytes) -> None:
    """torch.save stores; whatever unpacks to more than the file's size was made to."""
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("the archive is compressed")
