"""Matrices quantised by bitsandbytes, as it stores them, and what they mean."""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import torch
from torch import Tensor

PATH = "model.layers.0.mlp.down_proj"
CPU = torch.device("cpu")


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values whose spread differs from row to row, as block scales must notice."""
    generator = torch.Generator().manual_seed(seed)
    spread = 0.01 + torch.rand(rows, 1, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def four_bit(matrix: Tensor, **options: Any) -> tuple[dict[str, Tensor], Tensor, Any]:
    """The tensors of a module PATH, then `dequantize_4bit`'s two arguments."""
    codes, state = bnb.quantize_4bit(matrix, **options)
    tensors = {f"{PATH}.weight": codes}
    tensors |= {f"{PATH}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return tensors, codes, state


def int8(matrix: Tensor) -> dict[str, Tensor]:
    codes, absmax, _ = bnb.int8_vectorwise_quant(matrix.clone())
    return {
        f"{PATH}.weight": codes,
        f"{PATH}.SCB": absmax,
        f"{PATH}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def decode_by_formula(tensors: dict[str, Tensor], shape: tuple[int, int], block_size: int) -> Tensor:
    """Dequantised in float32, element by element of the flattened matrix. bitsandbytes' own CPU kernel counts blocks by
    row, which is wrong where rows and blocks do not end together."""
    data = {name.removeprefix(f"{PATH}.weight").removeprefix("."): value for name, value in tensors.items()}
    raw = np.frombuffer(data[""].contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)
    nibbles = np.stack([raw // 16, raw % 16], axis=1).ravel()[: shape[0] * shape[1]]
    absmax = data["absmax"].numpy()
    if "nested_absmax" in data:
        (text,) = (value for name, value in data.items() if name.startswith("quant_state"))
        state = json.loads(bytes(text.tolist()))
        groups = np.arange(len(absmax)) // state["nested_blocksize"]
        absmax = data["nested_quant_map"].numpy()[absmax] * data["nested_absmax"].numpy()[groups]
        absmax = absmax + np.float32(state["nested_offset"])
    blocks = np.arange(len(nibbles)) // block_size
    return torch.from_numpy(data["quant_map"].numpy()[nibbles] * absmax[blocks]).view(shape)


def set_state(tensors: dict[str, Tensor], **changes: Any) -> None:
    """Change fields of the JSON text; None removes one."""
    (name,) = (name for name in tensors if "quant_state" in name)
    state = json.loads(bytes(tensors[name].tolist())) | changes
    text = json.dumps({key: value for key, value in state.items() if value is not None})
    tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
