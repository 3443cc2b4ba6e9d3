"""GGUF files, presented under Hugging Face's config keys and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graftlm.checkpoint.file_identity import FileIdentity
from graftlm.checkpoint.gguf_architectures import ARCHITECTURES
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError

SOURCE_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a tensor comes from.

    Args:
        name: llama.cpp's.
        module: the same without layer and kind.
        kind: "weight" or "bias".
        expert: index into a tensor that holds all experts.
    """

    name: str
    module: str
    kind: str
    expert: int | None = None


class GGUFCheckpoint:
    """A `Checkpoint` over one GGUF file. `read` gives float32; `read_stored` keeps blocks as they are."""

    def __init__(self, path: Path) -> None:
        self.weight_files: Mapping[Path, FileIdentity] = {path: FileIdentity.of(path)}
        self._file = GGUFFile(path)
        if self._file.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path.name} holds a model Graft cannot read from GGUF",
                got=self._file.architecture,
                allowed=", ".join(sorted(ARCHITECTURES)),
            )
        self._translation = ARCHITECTURES[self._file.architecture](self._file)
        self._sources = _sources(self._file, self._translation)
        self._names = frozenset(self._sources)
        self.config: Mapping[str, Any] = self._translation.config
        self.quantization_config: Mapping[str, Any] | None = self._quantization_config()
        self.generation_config: Mapping[str, Any] = {"eos_token_id": self._end_token_ids()}
        self.tokenizer_source: Path | Mapping[str, Any] = self._file.metadata
        self.dtype = "float32"

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.shape(source.name)
        if source.expert is not None:
            shape = shape[1:]
        if self._is_vector(source, shape):
            shape = (1, *shape)
        return shape[::-1] if self._is_transposed(source) else shape

    def read(self, name: str) -> Tensor:
        source = self._sources[name]
        tensor = self._in_order(self._file.read(source.name, source.expert), source)
        if self._is_vector(source, tuple(tensor.shape)):
            tensor = tensor.unsqueeze(0)
        if source.module.endswith("norm") and source.kind == "weight":
            tensor = tensor - self._translation.norm_offset
        return tensor.T.contiguous() if self._is_transposed(source) else tensor

    def read_stored(self, name: str) -> Tensor:
        """A tensor as the file stores it, its rows in transformers' order: plain numbers in their dtype, blocks as
        uint8 [out, bytes of a row]. Weights that transformers keeps transposed stay [out, in], and norms keep what
        llama.cpp adds to them."""
        source = self._sources[name]
        return self._in_order(self._file.read_stored(source.name, source.expert), source)

    def close(self) -> None:
        self._file.close()

    def _is_vector(self, source: _Source, shape: tuple[int, ...]) -> bool:
        """Whether the file has a vector where transformers has a matrix of one row."""
        return source.kind == "weight" and source.module in self._translation.single_rows and len(shape) == 1

    def _is_transposed(self, source: _Source) -> bool:
        return source.kind == "weight" and source.module in self._translation.transposed

    def _in_order(self, tensor: Tensor, source: _Source) -> Tensor:
        reorder = self._translation.row_orders.get(source.module)
        return tensor if reorder is None else reorder(tensor)

    def _quantization_config(self) -> dict[str, Any] | None:
        kinds = {
            name: self._file.block_type(source.name)
            for name, source in self._sources.items()
            if len(self.shape(name)) == 2
        }
        block_types = {name: kind for name, kind in kinds.items() if kind is not None}
        return {"quant_method": "gguf", "block_types": block_types} if block_types else None

    def _end_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        ids = [self._file.field(key) for key in keys]
        return sorted({int(token_id) for token_id in ids if token_id is not None})


def _sources(file: GGUFFile, translation: Translation) -> dict[str, _Source]:
    """Where each of transformers' tensors comes from.

    Raises:
        CheckpointError: tensors the translation does not know.
    """
    sources: dict[str, _Source] = {}
    unknown = []
    for name in sorted(file.tensor_names() - translation.in_config):
        parts = SOURCE_NAME.fullmatch(name)
        module = None if parts is None else _module(parts["layer"], parts["module"], translation)
        if parts is None or module is None:
            unknown.append(name)
            continue
        experts = range(file.shape(name)[0]) if "{expert}" in module else (None,)
        for expert in experts:
            target = module.replace("{expert}", str(expert))
            sources[f"{target}.{parts['kind']}"] = _Source(
                name=name, module=parts["module"], kind=parts["kind"], expert=expert
            )
    if unknown:
        raise CheckpointError(f"{file.name} holds tensors Graft does not know", got=", ".join(unknown[:10]))
    return sources


def _module(layer: str | None, module: str, translation: Translation) -> str | None:
    """transformers' name of a module, or None when the translation does not know it."""
    if layer is None:
        return translation.modules.get(module)
    in_layer = translation.layer_modules.get(module)
    return None if in_layer is None else f"{translation.layer.format(layer)}.{in_layer}"
