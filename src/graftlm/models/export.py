"""A model written back to disk: the tensors its checkpoint has, under their names there, with the values it has now.

What reading does is undone: fused layers are split into their modules, Conv1D matrices turned, names taken back to the
file's, and each value rounded once to the dtype it had in the file. Tensor by tensor: no second copy of the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.checkpoint.open import MODEL_FILES
from graftlm.checkpoint.safetensors_folder import INDEX_NAME
from graftlm.checkpoint.safetensors_writer import MAX_SHARD_BYTES, PendingTensor, write_weights
from graftlm.errors import CheckpointError, ConfigurationError
from graftlm.models.base_weights import BaseWeights
from graftlm.models.layout import lay_out
from graftlm.models.read import read_spec
from graftlm.models.site import SiteMap
from graftlm.models.tensors import NamedTensors, check_tensors, expected_shapes, has_tied_head

# Written anew, or belonging to weights that are.
_OWN_FILES = frozenset({"config.json", INDEX_NAME})
_TEXT_KINDS = tuple(kind for kind in MODEL_FILES if kind != "*.safetensors")


def export_checkpoint(
    weights: BaseWeights,
    source: Checkpoint,
    folder: Path,
    *,
    files: Mapping[str, Path] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `weights` as a model folder for transformers.

    A model that is exported as it was read has every tensor of `source`, byte for byte, if its dtype holds those of the
    file. A head that is no longer the embedding table gets a tensor of its own, and the config says so; so it does
    when the vocabulary has another size.

    Args:
        weights: of the model in `source`, changed or not.
        folder: does not exist yet, or is empty. It appears complete or not at all.
        files: name -> path of what lies beside config and weights; by default `accompanying_files(source)`.
        max_shard_bytes: size of one weights file.

    Raises:
        CheckpointError: `source` is not a folder of plain numbers, or not the model it says it is.
        ConfigurationError: `folder` is not empty.
    """
    check_exportable(source, folder)
    tensors = exported_tensors(weights, source)
    config = _exported_config(source.config, weights.sites)
    beside = accompanying_files(source) if files is None else files
    write_model_folder(folder, config, beside, tensors, max_shard_bytes=max_shard_bytes)


def write_model_folder(
    folder: Path,
    config: Mapping[str, Any],
    files: Mapping[str, Path],
    tensors: Sequence[PendingTensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder that appears complete or not at all.

    Args:
        folder: does not exist yet, or is empty.
        config: of config.json.
        files: name -> path of what lies beside config and weights.
        max_shard_bytes: size of one weights file.
    """
    text = json.dumps(config, indent=2, ensure_ascii=False)
    partial_folder = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        (partial_folder / "config.json").write_text(text + "\n", encoding="utf-8")
        for name, path in files.items():
            shutil.copyfile(path, partial_folder / name)
        write_weights(partial_folder, tensors, max_shard_bytes=max_shard_bytes)
        partial_folder.replace(folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def check_exportable(source: Checkpoint, folder: Path) -> None:
    """Raise before any work is done, if `export_checkpoint` would.

    Raises:
        CheckpointError, ConfigurationError
    """
    is_folder = isinstance(source.tokenizer_source, Path)
    if source.quantization_config is not None or not is_folder:
        raise CheckpointError(
            "a quantised model cannot be written back",
            got=source.quantization_config if is_folder else ", ".join(path.name for path in source.weight_files),
            allowed="a model folder with weights in float32, bfloat16 or float16",
            do="take the model it was quantised from",
        )
    check_empty(folder)


def check_empty(folder: Path) -> None:
    """Raises: ConfigurationError: a folder to be written is there, and something is in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError("the output folder is not empty", got=folder, do="choose another, or remove it")


def accompanying_files(source: Checkpoint) -> dict[str, Path]:
    """Name -> path of what a model folder holds beside config and weights: tokenizer, templates, generation config, …;
    no code."""
    folder = source.tokenizer_source
    if not isinstance(folder, Path):
        return {}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in _OWN_FILES and any(fnmatch(path.name, kind) for kind in _TEXT_KINDS)
    }


def exported_tensors(weights: BaseWeights, source: Checkpoint) -> list[PendingTensor]:
    """The tensors of `export_checkpoint`, sorted by their names on disk.

    Raises:
        CheckpointError: the tensors in `source` do not fit its config.
    """
    family, spec = read_spec(source)
    names, layout = family.names, lay_out(spec, family.names)
    stored = NamedTensors(source, names)
    was_tied = has_tied_head(stored, names, tied=spec.head.tied)
    expected = expected_shapes(layout, tied_head=was_tied)
    check_tensors(stored, expected, names)
    values = dict(_values(weights))
    tensors = []
    for name in stored.names():
        if name in values:
            dtype = stored.read(name).dtype
            shape, read = _resized(name, stored.shape(name), weights.sites), partial(_rounded, values[name], dtype)
        elif name in expected and name.removesuffix(".weight") not in weights.sites.other_paths:
            raise CheckpointError(f"tensor {stored.stored_name(name)} cannot be written back")
        else:
            # Positions, and what no layer reads.
            dtype, shape, read = stored.read(name).dtype, stored.shape(name), partial(stored.read, name)
        tensors.append(PendingTensor(name=stored.stored_name(name), shape=shape, dtype=dtype, read=read))
    head = f"{names.head}.weight"
    if head not in stored and not weights.sites.tied_head:
        dtype = stored.read(f"{names.embedding}.weight").dtype
        shape = (weights.sites.vocab_size, weights.sites.embedding_size)
        tensors.append(PendingTensor(name=head, shape=shape, dtype=dtype, read=partial(_rounded, values[head], dtype)))
    return sorted(tensors, key=lambda tensor: tensor.name)


Value = Callable[[], Tensor | None]


def _values(weights: BaseWeights) -> Iterator[tuple[str, Value]]:
    """Names in memory, and what has them."""
    sites = weights.sites
    for path, site in sites.matrices.items():
        yield f"{path}.weight", partial(_matrix, weights, path, transposed=site.transposed)
        yield f"{path}.bias", partial(weights.bias, path)
    for name, stack in sites.expert_stacks.items():
        matrices = [partial(_matrix, weights, path, transposed=stack.transposed) for path in stack.experts]
        yield name, partial(_stacked, matrices)
        yield f"{name}_bias", partial(_stacked, [partial(weights.bias, path) for path in stack.experts])
    for path in sites.norms:
        yield f"{path}.weight", partial(_norm, weights, path, 0)
        yield f"{path}.bias", partial(_norm, weights, path, 1)
    yield f"{sites.embedding_path}.weight", weights.embedding


def _matrix(weights: BaseWeights, path: str, *, transposed: bool) -> Tensor:
    matrix = weights.linear(path).dequantize()
    return matrix.t() if transposed else matrix


def _stacked(values: Sequence[Value]) -> Tensor | None:
    tensors = [tensor for value in values if (tensor := value()) is not None]
    return torch.stack(tensors) if tensors else None


def _norm(weights: BaseWeights, path: str, index: int) -> Tensor | None:
    return weights.norm(path)[index]


def _rounded(value: Value, dtype: torch.dtype) -> Tensor:
    tensor = value()
    if tensor is None:
        raise ValueError("the file has a tensor that the model lacks")
    return tensor.to(dtype)


def _resized(name: str, shape: tuple[int, ...], sites: SiteMap) -> tuple[int, ...]:
    """Only the two ends can have another size than on disk: they have a row per token."""
    ends = {f"{end}.{tensor}" for end in (sites.embedding_path, sites.head_path) for tensor in ("weight", "bias")}
    return (sites.vocab_size, *shape[1:]) if name in ends else shape


def _exported_config(config: Mapping[str, Any], sites: SiteMap) -> dict[str, Any]:
    """The config in the file, true again. A model with other senses keeps the facts of its text in a part."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "tie_word_embeddings": sites.tied_head, "text_config": _corrected(text, sites)}
    return _corrected(config, sites)


def _corrected(config: Mapping[str, Any], sites: SiteMap) -> dict[str, Any]:
    corrected = {**config, "vocab_size": sites.vocab_size, "tie_word_embeddings": sites.tied_head}
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and padding >= sites.vocab_size:
        corrected["pad_token_id"] = None  # torch makes no embedding whose padding row does not exist
    return corrected
