"""Which modules of a checkpoint make up which layers of the decoder: a spec and a name map, multiplied out.

The tensors a checkpoint must have, the places adapters can attach to, and the layers that are built all follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graftlm.layers.patch import Slot
from graftlm.models.spec import (
    ExpertNames,
    ExpertRole,
    LayerSpec,
    LinearRole,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NameMap,
    NormRole,
    NormSpec,
    ParameterRole,
)

HEAD_SLOT = Slot("head")
FINAL_NORM_SLOT = Slot("final_norm")
EMBEDDING_NORM_SLOT = Slot("embedding_norm")
PROJECT_IN_SLOT = Slot("project_in")
PROJECT_OUT_SLOT = Slot("project_out")
LAYER_INPUT_SLOT = Slot("layer_inputs")
LAYER_INPUT_NORM_SLOT = Slot("layer_inputs_norm")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A parameter that stacks the matrices of `count` modules, which then have no tensors of their own; a module's is
    number `index`. Their biases are stacked in "<name>_bias"."""

    name: str
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """A linear module of the checkpoint, which holds `rows` output rows of a layer.

    parts: rows of each projection that the file has fused into this module, one under the other; empty where it holds
        one, or heads in turns.
    transposed: stored [in, out].
    """

    path: str
    rows: int
    parts: tuple[int, ...] = ()
    transposed: bool = False
    stack: Stack | None = None

    def tensor(self, kind: Literal["weight", "bias"]) -> str:
        """Name of the tensor that is, or holds, the module's weight or bias."""
        if self.stack is None:
            return f"{self.path}.{kind}"
        return self.stack.name if kind == "weight" else f"{self.stack.name}_bias"

    def stored_shape(self, *shape: int) -> tuple[int, ...]:
        """Shape of the tensor that holds the module's weight, [rows, in], or bias, [rows]."""
        if self.transposed:
            shape = shape[::-1]
        return shape if self.stack is None else (self.stack.count, *shape)


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
class ParameterLayout:
    """A tensor that is no module's weight or bias."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertStackLayout:
    """The parameter `name` of the module `module`, as PEFT sees it: the matrices of these layers, one per expert.

    transposed: they are stacked as [in, out].
    """

    name: str
    module: str
    layers: tuple[LinearLayout, ...]
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """experts: the linear layers of each. expert_stacks: what they are in memory, in the order of registration."""

    linears: Mapping[LinearRole, LinearLayout]
    norms: Mapping[NormRole, NormLayout]
    parameters: Mapping[ParameterRole, ParameterLayout] = field(default_factory=dict)
    experts: tuple[Mapping[ExpertRole, LinearLayout], ...] = ()
    expert_stacks: tuple[ExpertStackLayout, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """All modules of a model. tables: path -> shape of the embeddings, among them `layer_input_table`, where layers
    have inputs of their own. head: the output head, whether or not it is tied to the token table."""

    layers: tuple[LayerLayout, ...]
    tables: Mapping[str, tuple[int, int]]
    head: LinearLayout
    embedding_norm: NormLayout | None
    final_norm: NormLayout | None
    project_in: LinearLayout | None
    project_out: LinearLayout | None
    layer_input_table: str | None
    layer_input_projection: LinearLayout | None
    layer_input_norm: NormLayout | None

    def linears(self) -> Iterator[LinearLayout]:
        """All linear layers but the head, in model order."""
        if self.project_in is not None:
            yield self.project_in
        if self.layer_input_projection is not None:
            yield self.layer_input_projection
        for layer in self.layers:
            yield from layer.linears.values()
            for expert in layer.experts:
                yield from expert.values()
        if self.project_out is not None:
            yield self.project_out

    def linear_modules(self) -> Iterator[ModuleLayout]:
        """Their modules and the head's, in model order."""
        for linear in (*self.linears(), self.head):
            yield from linear.modules

    def matrices(self) -> Iterator[tuple[ModuleLayout, int]]:
        """Whatever a checkpoint may store quantised: the tables and every linear module, with the inputs of each."""
        for path, (rows, columns) in self.tables.items():
            yield ModuleLayout(path=path, rows=rows), columns
        for linear in (*self.linears(), self.head):
            yield from ((module, linear.in_features) for module in linear.modules)

    def norms(self) -> Iterator[NormLayout]:
        """All norms, in model order."""
        if self.embedding_norm is not None:
            yield self.embedding_norm
        if self.layer_input_norm is not None:
            yield self.layer_input_norm
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
    layer_input_table = layer_input_projection = layer_input_norm = None
    if spec.layer_inputs is not None and names.layer_inputs is not None:
        width = len(spec.layers) * spec.layer_inputs.size
        layer_input_table = names.layer_inputs.table
        tables[layer_input_table] = (spec.vocab_size, width)
        layer_input_projection = _projection(LAYER_INPUT_SLOT, names.layer_inputs.projection, hidden_size, width)
        layer_input_norm = _norm(LAYER_INPUT_NORM_SLOT, names.layer_inputs.norm, spec.layer_inputs.norm, hidden_size)
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
        layer_input_table=layer_input_table,
        layer_input_projection=layer_input_projection,
        layer_input_norm=layer_input_norm,
    )


def _layer(index: int, layer: LayerSpec, spec: ModelSpec, names: NameMap) -> LayerLayout:
    linears = {
        role: LinearLayout(
            slot=layer_slot(index, role),
            modules=_modules(
                [template.format(index) for template in names.linears[role]], size, transposed=role in names.conv1d
            ),
            in_features=size.in_features,
            bias=size.bias,
        )
        for role, size in _linear_sizes(layer, spec).items()
    }
    norms = {
        role: NormLayout(
            slot=layer_slot(index, f"{role}_norm"),
            path=names.norms[role].format(index),
            size=norm.size or spec.hidden_size,
            spec=norm,
        )
        for role, norm in layer.norms.items()
    }
    parameters: dict[ParameterRole, ParameterLayout] = {}
    if layer.attention.sinks:
        name = names.parameters["sinks"].format(index)
        parameters["sinks"] = ParameterLayout(name=name, shape=(layer.attention.num_heads,))
    if layer.scaled:
        parameters["layer_scalar"] = ParameterLayout(name=names.parameters["layer_scalar"].format(index), shape=(1,))
    mixture = layer.mixture
    if mixture is None or names.experts is None:
        return LayerLayout(linears=linears, norms=norms, parameters=parameters)
    if mixture.router_factor is not None:
        name = names.parameters["router_scale"].format(index)
        parameters["router_scale"] = ParameterLayout(name=name, shape=(spec.hidden_size,))
    if mixture.expert_scaled:
        name = names.parameters["expert_scale"].format(index)
        parameters["expert_scale"] = ParameterLayout(name=name, shape=(mixture.num_experts,))
    experts = tuple(
        _expert(index, mixture, expert, spec.hidden_size, names.experts) for expert in range(mixture.num_experts)
    )
    stacks = [
        ExpertStackLayout(
            name=name.format(index),
            module=name.format(index).rpartition(".")[0],
            layers=tuple(expert[role] for expert in experts),
            transposed=names.experts.transposed,
        )
        for role, name in names.experts.parameters.items()
    ]
    return LayerLayout(
        linears=linears, norms=norms, parameters=parameters, experts=experts, expert_stacks=tuple(stacks)
    )


def _expert(
    index: int, mlp: MoESpec, expert: int, hidden_size: int, names: ExpertNames
) -> dict[ExpertRole, LinearLayout]:
    gate_up, down = _gated_sizes(mlp.expert, hidden_size)
    return {
        "gate_up": _expert_linear(index, mlp, expert, "gate_up", gate_up, names),
        "down": _expert_linear(index, mlp, expert, "down", down, names),
    }


def _expert_linear(
    index: int, mlp: MoESpec, expert: int, role: ExpertRole, size: _LinearSize, names: ExpertNames
) -> LinearLayout:
    if role in names.modules:
        modules = _modules([template.format(index, expert) for template in names.modules[role]], size)
    else:
        name = names.parameters[role].format(index)
        stack = Stack(name=name, index=expert, count=mlp.num_experts)
        modules = _modules([f"{name}.{expert}"], size, transposed=names.transposed, stack=stack)
    slot = layer_slot(index, f"experts.{expert}.{role}")
    return LinearLayout(slot=slot, modules=modules, in_features=size.in_features, bias=size.bias)


@dataclass(frozen=True, kw_only=True)
class _LinearSize:
    """rows: output rows of each projection."""

    in_features: int
    rows: tuple[int, ...]
    bias: bool


def _modules(
    paths: Sequence[str], size: _LinearSize, *, transposed: bool = False, stack: Stack | None = None
) -> tuple[ModuleLayout, ...]:
    if len(paths) == 1 and len(size.rows) > 1:
        # One module on disk holds what others keep apart. Stacks of experts may have the rows of gate and up in turns.
        parts = size.rows if stack is None else ()
        return (ModuleLayout(path=paths[0], rows=sum(size.rows), parts=parts, transposed=transposed, stack=stack),)
    return tuple(
        ModuleLayout(path=path, rows=count, transposed=transposed, stack=stack)
        for path, count in zip(paths[: len(size.rows)], size.rows, strict=True)
    )


def _linear_sizes(layer: LayerSpec, spec: ModelSpec) -> dict[LinearRole, _LinearSize]:
    sizes = _branch_sizes(layer, spec.hidden_size)
    if spec.layer_inputs is not None:
        size = spec.layer_inputs.size
        sizes["layer_input_gate"] = _LinearSize(in_features=spec.hidden_size, rows=(size,), bias=False)
        sizes["layer_input_up"] = _LinearSize(in_features=size, rows=(spec.hidden_size,), bias=False)
    return sizes


def _branch_sizes(layer: LayerSpec, hidden_size: int) -> dict[LinearRole, _LinearSize]:
    """Of attention and feed-forward."""
    attention = layer.attention
    query_size = attention.num_heads * attention.head_dim
    key_size = attention.num_kv_heads * attention.head_dim
    qkv_rows: tuple[int, ...] = (query_size, key_size, key_size)
    if attention.kv_layer is not None:
        qkv_rows = qkv_rows[:1]
    elif attention.head_order == "keys_as_values":
        qkv_rows = qkv_rows[:2]
    elif attention.head_order == "grouped":
        qkv_rows = (sum(qkv_rows),)
    sizes: dict[LinearRole, _LinearSize] = {
        "qkv": _LinearSize(in_features=hidden_size, rows=qkv_rows, bias=attention.qkv_bias),
        "output": _LinearSize(in_features=query_size, rows=(hidden_size,), bias=attention.output_bias),
    }
    if isinstance(layer.mlp, MLPSpec):
        sizes |= _dense_sizes(layer.mlp, hidden_size)
    if layer.mixture is not None:
        sizes |= _mixture_sizes(layer.mixture, hidden_size)
    return sizes


def _dense_sizes(mlp: MLPSpec, hidden_size: int) -> dict[LinearRole, _LinearSize]:
    if mlp.gated:
        gate_up, down = _gated_sizes(mlp, hidden_size)
        return {"gate_up": gate_up, "down": down}
    return {
        "up": _LinearSize(in_features=hidden_size, rows=(mlp.intermediate_size,), bias=mlp.bias),
        "down": _LinearSize(in_features=mlp.intermediate_size, rows=(hidden_size,), bias=mlp.bias),
    }


def _mixture_sizes(moe: MoESpec, hidden_size: int) -> dict[LinearRole, _LinearSize]:
    """Of all but the experts themselves."""
    sizes: dict[LinearRole, _LinearSize] = {
        "router": _LinearSize(in_features=hidden_size, rows=(moe.num_experts,), bias=moe.router_bias)
    }
    if moe.shared is not None:
        sizes["shared_gate_up"], sizes["shared_down"] = _gated_sizes(moe.shared, hidden_size)
        sizes["shared_expert_gate"] = _LinearSize(in_features=hidden_size, rows=(1,), bias=False)
    return sizes


def _gated_sizes(mlp: MLPSpec, hidden_size: int) -> tuple[_LinearSize, _LinearSize]:
    """Of gate_up and down."""
    gate_up_rows = (mlp.intermediate_size, mlp.intermediate_size)
    return (
        _LinearSize(in_features=hidden_size, rows=gate_up_rows, bias=mlp.bias),
        _LinearSize(in_features=mlp.intermediate_size, rows=(hidden_size,), bias=mlp.bias),
    )


def _norm(slot: Slot, path: str | None, spec: NormSpec | None, hidden_size: int) -> NormLayout | None:
    if spec is None or path is None:
        return None
    return NormLayout(slot=slot, path=path, size=spec.size or hidden_size, spec=spec)


def _projection(slot: Slot, path: str | None, in_features: int, out_features: int) -> LinearLayout | None:
    if path is None:
        return None
    return LinearLayout(slot=slot, modules=(ModuleLayout(path=path, rows=out_features),), in_features=in_features)


def layer_slot(index: int, name: str) -> Slot:
    """What adapters know a part of a decoder layer under."""
    return Slot(f"layers.{index}.{name}")


def split_layer_slot(slot: Slot) -> tuple[int, str] | None:
    """The index and name that `layer_slot` was given; None for what is outside the layers."""
    stem, _, rest = slot.partition(".")
    index, _, name = rest.partition(".")
    return (int(index), name) if stem == "layers" else None
