"""The part of a GGUF file that comes before the weights: metadata, and where each tensor lies. Nothing is believed that
the file's own size contradicts, and every complaint names the key or tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import gguf

from graftlm.errors import CheckpointError

T = TypeVar("T")

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
STRING, ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
NUMBER_CODES = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the file.

    Args:
        shape: slowest dimension first, as torch lists them; a row is the last dimension.
        type: how rows are stored; the last of `shape` is a whole number of its blocks.
        start: the first byte in the file.
        row_bytes: bytes of one row.
    """

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_header(data: memoryview, file_name: str) -> GGUFHeader:
    """Parse the header of the GGUF file whose bytes are `data`.

    Raises:
        CheckpointError: it is not a GGUF file of version 2 or 3, ends early, or describes tensors that cannot be.
    """
    return _Parser(data, file_name).parse()


class _Parser:
    """Reads one value after the other. Source: the GGUF specification in ggml's docs/gguf.md."""

    def __init__(self, data: memoryview, file_name: str) -> None:
        self._data = data
        self._file_name = file_name
        self._at = 0
        self._where = "its first bytes"

    def parse(self) -> GGUFHeader:
        if bytes(self._take(4)) != b"GGUF":
            raise self._error("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._error(f"its version is {version}", allowed="versions 2 and 3, little-endian")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = self._named(num_keys, "metadata key", self._value)
        entries = self._named(num_tensors, "tensor", self._tensor_info)
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"its general.alignment is {alignment!r}")
        base = math.ceil(self._at / alignment) * alignment
        return GGUFHeader(
            metadata=metadata, tensors={name: self._entry(name, base, *info) for name, info in entries.items()}
        )

    def _named(self, count: int, kind: str, read: Callable[[], T]) -> dict[str, T]:
        found: dict[str, T] = {}
        for _ in range(count):
            self._where = f"the name of a {kind}"
            name = self._string()
            if name in found:
                raise self._error(f"{kind} {name} is there twice")
            self._where = f"{kind} {name}"
            found[name] = read()
        return found

    def _value(self) -> Any:
        return self._value_of(self._value_type())

    def _value_of(self, kind: gguf.GGUFValueType) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(NUMBER_CODES[kind])
        item, count = self._value_type(), self._number("Q")
        if item == ARRAY:
            raise self._error(f"{self._where} is an array of arrays")
        if item == STRING:
            return [self._string() for _ in range(count)]
        code = NUMBER_CODES[item]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _value_type(self) -> gguf.GGUFValueType:
        number = self._number("I")
        try:
            return gguf.GGUFValueType(number)
        except ValueError as cause:
            raise self._error(f"{self._where} has the unknown value type {number}") from cause

    def _tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"{self._where} has {num_dimensions} dimensions")
        fastest_first = [self._number("Q") for _ in range(num_dimensions)]
        return tuple(reversed(fastest_first)), self._number("I"), self._number("Q")

    def _entry(self, name: str, base: int, shape: tuple[int, ...], type_number: int, offset: int) -> TensorEntry:
        try:
            kind = gguf.GGMLQuantizationType(type_number)
        except ValueError as cause:
            raise self._error(f"tensor {name} has the unknown type {type_number}") from cause
        weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % weights:
            raise self._error(
                f"tensor {name} has the shape {list(shape)}", allowed=f"rows of {kind.name} blocks of {weights} weights"
            )
        entry = TensorEntry(shape=shape, type=kind, start=base + offset, row_bytes=shape[-1] // weights * block_bytes)
        if entry.start + entry.num_bytes > len(self._data):
            raise self._error(
                f"tensor {name} ends at byte {entry.start + entry.num_bytes} of {len(self._data)}",
                do="fetch the file again: it is cut short",
            )
        return entry

    def _string(self) -> str:
        # Vocabularies hold tokens that are no text on their own; this keeps their bytes.
        return bytes(self._take(self._number("Q"))).decode("utf-8", errors="surrogateescape")

    def _number(self, code: str) -> Any:
        [value] = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return value

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise self._error(f"it ends inside {self._where}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _error(self, got: str, *, allowed: str | None = None, do: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self._file_name} is not a readable GGUF file", got=got, allowed=allowed, do=do)
