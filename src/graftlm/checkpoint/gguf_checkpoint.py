"""GGUF files, presented under Hugging Face's config keys and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
        alternating: another tensor, each of whose rows stands after one of this one's.
    """

    name: str
    module: str
    kind: str
    expert: int | None = None
    alternating: str | None = None

    @property
    def rows_at(self) -> int:
        """The dimension of its rows, counted from the last."""
        return -2 if self.kind == "weight" else -1


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
        if source.alternating is not None:
            rows = shape[source.rows_at] * 2
            shape = (*shape[:-1], rows) if source.kind == "bias" else (*shape[:-2], rows, shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if self._is_transposed(source) else shape

    def read(self, name: str) -> Tensor:
        source = self._sources[name]
        tensor = self._in_order(self._file.read(source.name, source.expert), source)
        if source.alternating is not None:
            tensor = _by_turns(tensor, self._file.read(source.alternating, source.expert), source)
        if self._is_vector(source, tuple(tensor.shape)):
            tensor = tensor.unsqueeze(0)
        if source.module.endswith("norm") and source.kind == "weight":
            tensor = tensor - self._translation.norm_offset
        return tensor.mT.contiguous() if self._is_transposed(source) else tensor

    def read_stored(self, name: str) -> Tensor:
        """A tensor as the file stores it, its rows in transformers' order: plain numbers in their dtype, blocks as
        uint8 [out, bytes of a row]. Weights that transformers keeps transposed stay [out, in], and norms keep what
        llama.cpp adds to them."""
        source = self._sources[name]
        stored = self._in_order(self._file.read_stored(source.name, source.expert), source)
        if source.alternating is None:
            return stored
        return _by_turns(stored, self._file.read_stored(source.alternating, source.expert), source)

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
        if parts is not None and parts["layer"] is not None:
            in_layer = _in_layer(file, translation, name, parts["layer"], parts["module"], parts["kind"])
            if in_layer is not None:
                sources |= in_layer
                continue
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


def _in_layer(
    file: GGUFFile, translation: Translation, name: str, layer: str, module: str, kind: str
) -> dict[str, _Source] | None:
    """What a tensor of a layer is where it is no module's weight or bias alone; None where it is.

    Raises:
        CheckpointError: tensors whose rows alternate are not alike.
    """
    prefix = translation.layer.format(layer)
    parameter = translation.parameters.get(f"{module}.{kind}")
    if parameter is not None:
        return {f"{prefix}.{parameter}": _Source(name=name, module=module, kind=kind)}
    if module in translation.alternating.values():
        return {}
    stack = translation.stacks.get(module)
    if stack is None:
        return None
    other = translation.alternating.get(module)
    alternating = None if other is None else f"blk.{layer}.{other}.{kind}"
    if alternating is not None and not file.are_alike(name, alternating):
        raise CheckpointError(f"{file.name}: {name} and {alternating} are not alike, or one is missing")
    if kind == "bias":
        return {f"{prefix}.{stack}_bias": _Source(name=name, module=module, kind=kind, alternating=alternating)}
    if file.block_type(name) is None:
        return {f"{prefix}.{stack}": _Source(name=name, module=module, kind=kind, alternating=alternating)}
    return {
        f"{prefix}.{stack}.{expert}.weight": _Source(
            name=name, module=module, kind=kind, expert=expert, alternating=alternating
        )
        for expert in range(file.shape(name)[0])
    }


def _by_turns(tensor: Tensor, other: Tensor, source: _Source) -> Tensor:
    """The rows of two tensors, one of each in turn."""
    dim = source.rows_at
    return torch.stack([tensor, other], dim=dim).flatten(dim - 1, dim)


def _module(layer: str | None, module: str, translation: Translation) -> str | None:
    """transformers' name of a module, or None when the translation does not know it."""
    if layer is None:
        return translation.modules.get(module)
    in_layer = translation.layer_modules.get(module)
    return None if in_layer is None else f"{translation.layer.format(layer)}.{in_layer}"
