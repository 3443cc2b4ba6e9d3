"""A model written with its linear layers quantised, for transformers and the library whose format it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.checkpoint.safetensors_writer import PendingTensor
from graftlm.errors import CheckpointError, ConfigurationError
from graftlm.models.export import accompanying_files, check_empty, write_model_folder
from graftlm.models.layout import ModelLayout, ModuleLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.spec import NameMap
from graftlm.models.stored_weights import StoredWeights, stored_quantization
from graftlm.models.tensors import NamedTensors, check_tensors, expected_shapes, has_tied_head
from graftlm.quantization.policy import LoadPolicy
from graftlm.quantization.written import WrittenFormat
from graftlm.text import load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_quantized(
    source: Checkpoint, folder: Path, written: WrittenFormat, *, skipped: Sequence[str] = (), requantize: bool = False
) -> None:
    """Write `source` with the linear layers of every block quantised. Head, embeddings, norms, routers and experts stay
    as they are: what transformers quantises and no more. What `source` has quantised is dequantised first.

    All quantised weights are in memory at once, but one matrix at a time in full precision.

    Args:
        folder: does not exist yet, or is empty. It appears complete or not at all.
        skipped: modules that are not quantised: whole parts of their paths, as in `EngineConfig.quantize_skip`.
        requantize: quantise what is quantised already; both errors add up.

    Raises:
        CheckpointError: `source` cannot be read, or a matrix has no place in the format.
        ConfigurationError: `source` is quantised and `requantize` is not given, `skipped` names no module, or `folder`
            is not empty.
    """
    check_quantizable(source, folder, written, skipped=skipped, requantize=requantize)
    family, spec = read_spec(source)
    layout, tensors = lay_out(spec, family.names), NamedTensors(source, family.names)
    stored, dtype = StoredWeights(tensors), _dtype(source)
    policy = LoadPolicy(skipped=tuple(skipped))
    _check(tensors, stored, layout, family.names, tied=spec.head.tied)
    pending: list[PendingTensor] = []
    replaced: set[str] = set()
    kept = [family.names.head]
    for module, in_features, quantised in _modules(layout):
        if not quantised or policy.skips(module.path):
            kept.append(module.path)
            continue
        matrix = stored.full(module, in_features, dtype=dtype, device=torch.device("cpu")).to(dtype)
        replaced |= _own_tensors(tensors, stored, module.path)
        for part, tensor in written.quantizer(module.path).quantize(matrix, dtype=dtype).stored_tensors().items():
            pending.append(PendingTensor.of(f"{tensors.stored_path(module.path)}.{part}", tensor))
    for module, in_features in layout.matrices():
        if stored.is_quantized(module.path) and not (own := _own_tensors(tensors, stored, module.path)) <= replaced:
            matrix = stored.full(module, in_features, dtype=dtype, device=torch.device("cpu"))
            matrix = matrix.t() if module.transposed else matrix
            replaced |= own
            pending.append(PendingTensor.of(f"{tensors.stored_path(module.path)}.weight", matrix.contiguous()))
    others = (tensors.stored_name(name) for name in tensors.names())
    pending.extend(PendingTensor.of(name, source.read(name)) for name in others if name not in replaced)
    config = {**source.config, "quantization_config": written.config(kept, source.dtype)}
    with TemporaryDirectory() as scratch:
        files = _files(source, Path(scratch))
        write_model_folder(folder, config, files, sorted(pending, key=lambda tensor: tensor.name))


def check_quantizable(
    source: Checkpoint, folder: Path, written: WrittenFormat, *, skipped: Sequence[str] = (), requantize: bool = False
) -> None:
    """Raise before any work is done, if `export_quantized` would for a reason that shows at once.

    Raises:
        CheckpointError, ConfigurationError
    """
    stored = stored_quantization(source)
    if stored is not None and not requantize:
        raise ConfigurationError(
            "the model is quantised already",
            got=stored.get("quant_method"),
            do="take the model it was quantised from, or add requantize, and both errors add up",
        )
    check_empty(folder)
    family, spec = read_spec(source)
    modules = list(_modules(lay_out(spec, family.names)))
    policy = LoadPolicy(skipped=tuple(skipped))
    policy.check_skipped([module.path for module, _, _ in modules])
    for module, _, quantised in modules:
        if quantised and module.transposed and not written.conv1d and not policy.skips(module.path):
            raise CheckpointError(
                f"{module.path} has no place in this format: transformers keeps it as Conv1D", do="choose another"
            )


def _check(tensors: NamedTensors, stored: StoredWeights, layout: ModelLayout, names: NameMap, *, tied: bool) -> None:
    quantized = [module.path for module, _ in layout.matrices() if stored.is_quantized(module.path)]
    matrices = {f"{path}.weight" for path in quantized}
    shapes = expected_shapes(layout, tied_head=has_tied_head(tensors, names, tied=tied))
    check_tensors(
        tensors,
        {name: shape for name, shape in shapes.items() if name not in matrices},
        names,
        claimed=frozenset().union(*(stored.tensor_names(path) for path in quantized)),
    )


def _own_tensors(tensors: NamedTensors, stored: StoredWeights, path: str) -> frozenset[str]:
    """The tensors in the file that make up a module's matrix."""
    if stored.is_quantized(path):
        return stored.tensor_names(path)
    return frozenset({tensors.stored_name(f"{path}.weight")})


def _files(source: Checkpoint, scratch: Path) -> dict[str, Path]:
    """Name -> path of what lies beside config and weights. Those of a GGUF file are written to `scratch`."""
    if isinstance(source.tokenizer_source, Path):
        return accompanying_files(source)
    load_tokenizer(source.tokenizer_source).save(scratch)
    (scratch / "generation_config.json").write_text(json.dumps(source.generation_config), encoding="utf-8")
    return {path.name: path for path in sorted(scratch.iterdir())}


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
