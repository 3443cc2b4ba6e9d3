"""The JSON text that bitsandbytes keeps beside a 4-bit matrix."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes.code_tables import FourBitType

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# `quant_storage`: the same bytes under another dtype, which all tensors of a sharded model can then have in common.
STORAGE_DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "float64": torch.float64, **DTYPES}
QUANT_TYPES: tuple[FourBitType, ...] = ("nf4", "fp4")
NESTED_KEYS = ("nested_blocksize", "nested_dtype", "nested_offset")
KEYS = ("quant_type", "blocksize", "dtype", "shape", *NESTED_KEYS)
TENSOR_NAMES = {quant_type: f"quant_state.bitsandbytes__{quant_type}" for quant_type in QUANT_TYPES}


@dataclass(frozen=True, kw_only=True)
class NestedState:
    """How the scales are quantised: `block_size` of them share a scale, and `offset` was subtracted from all."""

    block_size: int
    offset: float


@dataclass(frozen=True, kw_only=True)
class QuantState:
    """How a matrix is quantised.

    dtype: what the matrix was quantised from, and what bitsandbytes' `dequantize_4bit` returns.
    nested: absent where the scales are stored as they are.
    """

    quant_type: FourBitType
    block_size: int
    dtype: torch.dtype
    shape: tuple[int, int]
    nested: NestedState | None

    @property
    def tensor_name(self) -> str:
        """What the text is called, after `weight.`."""
        return TENSOR_NAMES[self.quant_type]

    def to_tensor(self) -> Tensor:
        """The text as bitsandbytes stores it: uint8 [length]."""
        fields: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        if self.nested is not None:
            fields["nested_blocksize"] = self.nested.block_size
            fields["nested_dtype"] = "float32"
            fields["nested_offset"] = self.nested.offset
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    @classmethod
    def parse(cls, text: bytes, name: str, *, quant_type: FourBitType, shape: tuple[int, int]) -> QuantState:
        """The state in the tensor `name`.

        Args:
            quant_type: the type the tensor's name says.
            shape: (out, in), what the model's config asks for.

        Raises:
            CheckpointError: it is no JSON object, lacks a field, or holds a field or value that is unknown or
                contradicts the arguments; the message names the tensor and the field.
        """
        fields = _Fields(text, name)
        fields.one_of("quant_type", (quant_type,))
        block_size = fields.one_of("blocksize", BLOCK_SIZES)
        dtype = DTYPES[fields.one_of("dtype", tuple(DTYPES))]
        fields.one_of("shape", (list(shape),))
        return cls(quant_type=quant_type, block_size=block_size, dtype=dtype, shape=shape, nested=_nested(fields))


def _nested(fields: _Fields) -> NestedState | None:
    if not any(fields.has(key) for key in NESTED_KEYS):
        return None
    block_size = fields.one_of("nested_blocksize", BLOCK_SIZES)
    fields.one_of("nested_dtype", ("float32",))
    return NestedState(block_size=block_size, offset=fields.finite("nested_offset"))


class _Fields:
    """The JSON object in a tensor's bytes, with errors that name the tensor."""

    def __init__(self, text: bytes, name: str) -> None:
        self._name = name
        try:
            fields = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as cause:
            raise CheckpointError(f"tensor {name} does not hold JSON", got=str(cause)[:200]) from cause
        if not isinstance(fields, dict):
            raise CheckpointError(f"tensor {name} does not hold a JSON object", got=type(fields).__name__)
        unknown = sorted(fields.keys() - set(KEYS))
        if unknown:
            raise CheckpointError(
                f"tensor {name} holds an unknown field", got=repr(unknown)[:200], allowed=", ".join(KEYS)
            )
        self._fields = fields

    def has(self, key: str) -> bool:
        return key in self._fields

    def one_of(self, key: str, allowed: tuple[Any, ...]) -> Any:
        """The value of `key`, one of `allowed` in type as well: JSON's 64.0 and true are no sizes."""
        value = self._fields.get(key)
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return candidate
        raise CheckpointError(
            f"tensor {self._name} holds an unusable {key}",
            got=repr(value)[:200],
            allowed=", ".join(str(candidate) for candidate in allowed),
        )

    def finite(self, key: str) -> float:
        value = self._fields.get(key)
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            return float(value)
        raise CheckpointError(
            f"tensor {self._name} holds an unusable {key}", got=repr(value)[:200], allowed="a finite number"
        )
