"""A model written with its linear layers quantised, for transformers and the library whose format it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.checkpoint.safetensors_writer import PendingTensor
from graftlm.errors import CheckpointError, ConfigurationError
from graftlm.models.export import accompanying_files, check_exportable, write_model_folder
from graftlm.models.layout import ModelLayout, ModuleLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensors import NamedTensors, check_tensors, expected_shapes, has_tied_head
from graftlm.quantization.written import WRITTEN_FORMATS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_quantized(source: Checkpoint, folder: Path, quantization: str) -> None:
    """Write `source` with the linear layers of every block quantised. Head, embeddings, norms, routers and experts stay
    as they are: what transformers quantises and no more.

    All quantised weights are in memory at once, but one matrix at a time in full precision.

    Args:
        folder: does not exist yet, or is empty. It appears complete or not at all.
        quantization: a name in `WRITTEN_FORMATS`.

    Raises:
        CheckpointError: `source` is no folder of plain numbers, or a matrix has no place in the format.
        ConfigurationError: an unknown format, or `folder` is not empty.
    """
    if quantization not in WRITTEN_FORMATS:
        raise ConfigurationError(
            "this is no format a model can be written in", got=repr(quantization), allowed=", ".join(WRITTEN_FORMATS)
        )
    check_exportable(source, folder)
    written = WRITTEN_FORMATS[quantization]
    family, spec = read_spec(source)
    layout, tensors = lay_out(spec, family.names), NamedTensors(source, family.names)
    tied_head = has_tied_head(tensors, family.names, tied=spec.head.tied)
    check_tensors(tensors, expected_shapes(layout, tied_head=tied_head), family.names)
    stored, dtype = StoredWeights(tensors), _dtype(source)
    pending: list[PendingTensor] = []
    replaced, kept = set(), [family.names.head]
    for module, in_features, quantised in _modules(layout):
        if not quantised:
            kept.append(module.path)
            continue
        matrix = stored.full(module, in_features, dtype=dtype, device=torch.device("cpu")).to(dtype)
        replaced.add(f"{module.path}.weight")
        for part, tensor in written.quantizer.quantize(matrix, dtype=dtype).stored_tensors().items():
            pending.append(PendingTensor.of(f"{tensors.stored_path(module.path)}.{part}", tensor))
    others = tensors.names() - replaced
    pending.extend(PendingTensor.of(tensors.stored_name(name), tensors.read(name)) for name in others)
    config = {**source.config, "quantization_config": written.config(kept, source.dtype)}
    write_model_folder(folder, config, accompanying_files(source), sorted(pending, key=lambda tensor: tensor.name))


def _modules(layout: ModelLayout) -> Iterator[tuple[ModuleLayout, int, bool]]:
    """Linear modules that are no experts', their inputs, and whether they are quantised."""
    for linear in (layout.project_in, layout.layer_input_projection, layout.project_out):
        if linear is not None:
            yield from ((module, linear.in_features, True) for module in linear.modules)
    for layer in layout.layers:
        for role, linear in layer.linears.items():
            yield from ((module, linear.in_features, role != "router") for module in linear.modules)


def _dtype(source: Checkpoint) -> torch.dtype:
    if source.dtype not in _DTYPES:
        raise CheckpointError(
            "the checkpoint is saved in a dtype that is not quantised", got=source.dtype, allowed=", ".join(_DTYPES)
        )
    return _DTYPES[source.dtype]
