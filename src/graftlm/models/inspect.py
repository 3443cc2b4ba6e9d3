"""How a checkpoint stores its matrices, module by module, without building the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.models.layout import ModuleLayout, lay_out
from graftlm.models.read import read_spec
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensors import NamedTensors, has_tied_head
from graftlm.quantization import DenseWeight, Weight


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """One module's matrix. shape: (out, in). format: as `Weight.format`. num_bytes: scales included."""

    path: str
    shape: tuple[int, int]
    format: str
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """matrices: in model order, the token table first, the head last unless it is the table.

    other_bytes: norms, biases and position tables. tied_head: whether the head is the token table.
    """

    model_type: str
    dtype: str
    quant_method: str | None
    matrices: tuple[StoredMatrix, ...]
    other_bytes: int
    tied_head: bool

    @property
    def num_weights(self) -> int:
        """Of all matrices."""
        return sum(matrix.shape[0] * matrix.shape[1] for matrix in self.matrices)

    @property
    def matrix_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices)


def inspect_checkpoint(checkpoint: Checkpoint) -> ModelReport:
    """Read every matrix once, one at a time.

    Raises:
        CheckpointError: the model is not supported, or tensors of a quantised matrix are missing or misshapen.
    """
    family, spec = read_spec(checkpoint)
    names, layout = family.names, lay_out(spec, family.names)
    tensors = NamedTensors(checkpoint, names)
    stored = StoredWeights(tensors)
    tied_head = has_tied_head(tensors, names, tied=spec.head.tied)
    rows, columns = layout.tables[names.embedding]
    modules = [(ModuleLayout(path=names.embedding, rows=rows), columns)]
    for linear in (*layout.linears(), *(() if tied_head else (layout.head,))):
        modules += [(module, linear.in_features) for module in linear.modules]
    matrices = tuple(_describe(stored, *module) for module in modules)
    read = frozenset().union(*(_stored_names(tensors, stored, module) for module, _ in modules))
    copied = {f"{names.head}.{part}" for part in tensors.parts(names.head)} if tied_head else set()
    quantization = checkpoint.quantization_config
    return ModelReport(
        model_type=str(checkpoint.config.get("model_type")),
        dtype=checkpoint.dtype,
        quant_method=None if quantization is None else str(quantization.get("quant_method")),
        matrices=matrices,
        other_bytes=sum(
            tensors.read(name).nbytes for name in tensors.names() - copied if tensors.stored_name(name) not in read
        ),
        tied_head=tied_head,
    )


def _stored_names(tensors: NamedTensors, stored: StoredWeights, module: ModuleLayout) -> frozenset[str]:
    """The tensors in the file that make up a matrix, alone or with others."""
    if stored.is_quantized(module.path):
        return stored.tensor_names(module.path)
    return frozenset({tensors.stored_name(module.tensor("weight"))})


def _describe(stored: StoredWeights, module: ModuleLayout, columns: int) -> StoredMatrix:
    shape = (module.rows, columns)
    weight: Weight
    if stored.is_quantized(module.path):
        weight = stored.quantized(module, columns, dtype=torch.float32, device=torch.device("cpu"))
    else:
        weight = DenseWeight(stored.full(module, columns, dtype=torch.float32, device=torch.device("cpu")))
    return StoredMatrix(path=module.path, shape=shape, format=weight.format, num_bytes=weight.num_bytes)
