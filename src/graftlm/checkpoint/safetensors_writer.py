"""Writing model weights tensor by tensor: however large the model, one tensor of it is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from graftlm.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME

# What transformers has cut files at for years; many tools read such files only.
MAX_SHARD_BYTES = 5_000_000_000
# The format's names, in the order its own library lays tensors out: the widest alignment first.
DTYPE_CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(DTYPE_CODES)


@dataclass(frozen=True, kw_only=True)
class PendingTensor:
    """A tensor that is made when it is written. read: gives it in this shape and dtype, on any device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> PendingTensor:
        """One that is made already."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.detach)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_weights(folder: Path, tensors: Sequence[PendingTensor], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors as transformers does: one file, or several with an index when one would be too large.

    Args:
        folder: exists. max_shard_bytes: size of one file's tensors; a single larger tensor has a file to itself.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    plan = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern=SINGLE_NAME.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in plan.filename_to_tensors.items():
        write_safetensors(folder / file_name, [by_name[name] for name in names])
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Sequence[PendingTensor]) -> None:
    """Write one file, byte for byte as the safetensors library would.

    Source: github.com/huggingface/safetensors, "Format".
    """
    ordered = sorted(tensors, key=lambda tensor: (_ORDER.index(tensor.dtype), tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            file.write(_content(tensor))


def _content(pending: PendingTensor) -> memoryview:
    tensor = pending.read()
    if tuple(tensor.shape) != pending.shape or tensor.dtype != pending.dtype:
        raise ValueError(
            f"{pending.name}: {list(tensor.shape)} {tensor.dtype} was made, "
            f"{list(pending.shape)} {pending.dtype} was announced"
        )
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
