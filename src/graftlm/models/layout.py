"""Which modules of a checkpoint make up which layers of the decoder: a spec and a name map, multiplied out.

The tensors a checkpoint must have, the places adapters can attach to, and the layers that are built all follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graftlm.layers.patch import Slot
from graftlm.models.spec import LayerSpec, LinearRole, ModelSpec, NameMap, NormRole, NormSpec

HEAD_SLOT = Slot("head")
FINAL_NORM_SLOT = Slot("final_norm")
EMBEDDING_NORM_SLOT = Slot("embedding_norm")
PROJECT_IN_SLOT = Slot("project_in")
PROJECT_OUT_SLOT = Slot("project_out")


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """A linear module of the checkpoint, which holds `rows` output rows of a layer. transposed: stored [in, out]."""

    path: str
    rows: int
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearLayout:
    """A linear layer: modules stacked in order."""

    slot: Slot
    modules: tuple[ModuleLayout, ...]
    in_features: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class NormLayout:
    slot: Slot
    path: str
    size: int
    spec: NormSpec


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    linears: Mapping[LinearRole, LinearLayout]
    norms: Mapping[NormRole, NormLayout]


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """All modules of a model. tables: path -> shape of the embeddings. head: the output head, whether or not it is tied
    to the token table."""

    layers: tuple[LayerLayout, ...]
    tables: Mapping[str, tuple[int, int]]
    head: LinearLayout
    embedding_norm: NormLayout | None
    final_norm: NormLayout | None
    project_in: LinearLayout | None
    project_out: LinearLayout | None

    def linears(self) -> Iterator[LinearLayout]:
        """All linear layers but the head, in model order."""
        if self.project_in is not None:
            yield self.project_in
        for layer in self.layers:
            yield from layer.linears.values()
        if self.project_out is not None:
            yield self.project_out

    def norms(self) -> Iterator[NormLayout]:
        """All norms, in model order."""
        if self.embedding_norm is not None:
            yield self.embedding_norm
        for layer in self.layers:
            yield from layer.norms.values()
        if self.final_norm is not None:
            yield self.final_norm


def lay_out(spec: ModelSpec, names: NameMap) -> ModelLayout:
    """The modules of a model, from its spec alone: no weight is read."""
    hidden_size, embedding_size = spec.hidden_size, spec.embedding_size
    tables = {names.embedding: (spec.vocab_size, embedding_size)}
    if spec.embedding.num_positions is not None and names.position_embedding is not None:
        rows = spec.embedding.num_positions + spec.embedding.position_offset
        tables[names.position_embedding] = (rows, hidden_size)
    projects = embedding_size != hidden_size
    head = ModuleLayout(path=names.head, rows=spec.vocab_size)
    return ModelLayout(
        layers=tuple(_layer(index, layer, spec, names) for index, layer in enumerate(spec.layers)),
        tables=tables,
        head=LinearLayout(slot=HEAD_SLOT, modules=(head,), in_features=embedding_size, bias=spec.head.bias),
        embedding_norm=_norm(EMBEDDING_NORM_SLOT, names.embedding_norm, spec.embedding.norm, hidden_size),
        final_norm=_norm(FINAL_NORM_SLOT, names.final_norm, spec.final_norm, hidden_size),
        project_in=_projection(PROJECT_IN_SLOT, names.project_in, embedding_size, hidden_size) if projects else None,
        project_out=_projection(PROJECT_OUT_SLOT, names.project_out, hidden_size, embedding_size) if projects else None,
    )


def _layer(index: int, layer: LayerSpec, spec: ModelSpec, names: NameMap) -> LayerLayout:
    linears = {}
    for role, (in_features, rows, bias) in _linear_sizes(layer, spec.hidden_size).items():
        paths = [template.format(index) for template in names.linears[role]]
        # One module on disk may hold what others keep apart.
        rows = rows if len(paths) == len(rows) else (sum(rows),)
        modules = [
            ModuleLayout(path=path, rows=count, transposed=role in names.conv1d)
            for path, count in zip(paths, rows, strict=True)
        ]
        linears[role] = LinearLayout(
            slot=_layer_slot(index, role), modules=tuple(modules), in_features=in_features, bias=bias
        )
    norms = {
        role: NormLayout(
            slot=_layer_slot(index, f"{role}_norm"),
            path=names.norms[role].format(index),
            size=norm.size or spec.hidden_size,
            spec=norm,
        )
        for role, norm in layer.norms.items()
    }
    return LayerLayout(linears=linears, norms=norms)


def _linear_sizes(layer: LayerSpec, hidden_size: int) -> dict[LinearRole, tuple[int, tuple[int, ...], bool]]:
    """Role -> (in, out of each projection, bias)."""
    attention, mlp = layer.attention, layer.mlp
    query_size = attention.num_heads * attention.head_dim
    key_size = attention.num_kv_heads * attention.head_dim
    sizes: dict[LinearRole, tuple[int, tuple[int, ...], bool]] = {
        "qkv": (hidden_size, (query_size, key_size, key_size), attention.qkv_bias),
        "output": (query_size, (hidden_size,), attention.output_bias),
    }
    if mlp.gated:
        sizes["gate_up"] = (hidden_size, (mlp.intermediate_size, mlp.intermediate_size), mlp.bias)
    else:
        sizes["up"] = (hidden_size, (mlp.intermediate_size,), mlp.bias)
    sizes["down"] = (mlp.intermediate_size, (hidden_size,), mlp.bias)
    return sizes


def _norm(slot: Slot, path: str | None, spec: NormSpec | None, hidden_size: int) -> NormLayout | None:
    if spec is None or path is None:
        return None
    return NormLayout(slot=slot, path=path, size=spec.size or hidden_size, spec=spec)


def _projection(slot: Slot, path: str | None, in_features: int, out_features: int) -> LinearLayout | None:
    if path is None:
        return None
    return LinearLayout(slot=slot, modules=(ModuleLayout(path=path, rows=out_features),), in_features=in_features)


def _layer_slot(index: int, name: str) -> Slot:
    return Slot(f"layers.{index}.{name}")
