"""Where adapters can attach: modules under the family's own names, and the rows of the fused layers they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graftlm.layers.patch import Slot
from graftlm.models.layout import ExpertStackLayout, LinearLayout, ModelLayout, lay_out
from graftlm.models.spec import ModelSpec, NameMap


@dataclass(frozen=True, kw_only=True)
class LinearSite:
    """Output rows [start, stop) of the linear layer `slot`, known to PEFT under `path`.

    transposed: PEFT sees the module's matrix as [in, out] (transformers' Conv1D).
    """

    path: str
    slot: Slot
    start: int
    stop: int
    in_features: int
    transposed: bool

    @property
    def out_features(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class ExpertStack:
    """A parameter that stacks a matrix of each expert: what PEFT's `target_parameters` adapt.

    path: its name in the model. module: the module that holds it. experts: paths of the matrices. transposed: they are
    stacked as [in, out].
    """

    path: str
    module: str
    experts: tuple[str, ...]
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class NormSite:
    """The norm `slot`, `size` wide. has_bias: besides its weight."""

    path: str
    slot: Slot
    size: int
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class SiteMap:
    """Every module of a model that an adapter can name.

    matrices: path -> site of everything with a matrix, in model order, the output head last.
    linears: those of them that are linear modules to PEFT.
    routers: those that choose experts and whose weight PEFT adapts as a parameter.
    expert_modules: those that held one expert's weights before transformers 5 stacked them.
    expert_stacks: path of the parameter -> what it holds now; of one module, in the order of registration.
    norms: path -> site. other_paths: modules with weights that no adapter can change as a whole (position tables, the
        experts of a layer), and parameters that belong to no such module.
    renames: (pattern, replacement) from names in older files to these paths, as in `NameMap`.
    unused_modules: regular expressions of modules that no text passes through, as in `NameMap`.
    default_targets, ia3_targets, ia3_feedforward, ln_tuning_targets: what PEFT targets when a config names nothing, as
        in `NameMap`.
    tied_head: whether embedding and head share one matrix. embedding_size: width of a row of either.
    has_token_inputs: every layer reads the token itself, so that there can be no other than the vocabulary's.
    key_shapes: heads and head size of the keys, of each layer that has keys of its own.
    layer_paths: the decoder layers. interchangeable_layers: whether any of them may stand at any depth: all cache
        alike, and none reads another's keys and values or an input for its own depth.
    """

    matrices: Mapping[str, LinearSite]
    linears: Mapping[str, LinearSite]
    routers: frozenset[str]
    expert_modules: frozenset[str]
    expert_stacks: Mapping[str, ExpertStack]
    norms: Mapping[str, NormSite]
    renames: tuple[tuple[str, str], ...]
    embedding_path: str
    head_path: str
    other_paths: frozenset[str]
    unused_modules: tuple[str, ...]
    default_targets: tuple[str, ...]
    ia3_targets: tuple[str, ...]
    ia3_feedforward: tuple[str, ...]
    ln_tuning_targets: tuple[str, ...]
    vocab_size: int
    embedding_size: int
    tied_head: bool
    has_token_inputs: bool
    key_shapes: tuple[tuple[int, int], ...]
    layer_paths: tuple[str, ...]
    interchangeable_layers: bool

    @property
    def plain_linears(self) -> frozenset[str]:
        """Linear modules that are no Conv1D, for which PEFT does not define many methods."""
        return frozenset(path for path, site in self.linears.items() if not site.transposed)

    @property
    def module_paths(self) -> frozenset[str]:
        """All modules with weights."""
        return frozenset({self.embedding_path, *self.norms, *self.linears, *self.routers, *self.other_paths})

    @property
    def known_paths(self) -> frozenset[str]:
        """Modules that an adapter's files may name: these, and the experts' of old."""
        return self.module_paths | self.expert_modules

    @property
    def former_linears(self) -> frozenset[str]:
        """What were linear modules before transformers 5, and may still be adapted under those names."""
        return self.expert_modules | self.routers if self.expert_modules else frozenset()


def map_sites(spec: ModelSpec, names: NameMap) -> SiteMap:
    """The sites of a model, from its spec alone: no weight is read."""
    layout = lay_out(spec, names)
    all_linears = [*layout.linears(), layout.head]
    linears = _linear_sites(all_linears)
    routers = _parameter_routers(layout, names)
    experts = _linear_sites(linear for layer in layout.layers for expert in layer.experts for linear in expert.values())
    stacks = [stack for layer in layout.layers for stack in layer.expert_stacks]
    stacked = {site.slot: site for stack in stacks for site in _stacked_sites(stack)}
    matrices: dict[str, LinearSite] = {}
    for linear in all_linears:
        if linear.slot in stacked:
            matrices[stacked[linear.slot].path] = stacked[linear.slot]
        matrices.update((module.path, linears[module.path]) for module in linear.modules)
    return SiteMap(
        matrices=matrices,
        linears={path: site for path, site in linears.items() if path not in routers and path not in experts},
        routers=frozenset(routers),
        expert_modules=frozenset(experts) - {site.path for site in stacked.values()},
        expert_stacks={
            stack.name: ExpertStack(
                path=stack.name,
                module=stack.module,
                experts=tuple(site.path for site in _stacked_sites(stack)),
                transposed=stack.transposed,
            )
            for stack in stacks
        },
        norms={
            norm.path: NormSite(path=norm.path, slot=norm.slot, size=norm.size, has_bias=norm.spec.bias)
            for norm in layout.norms()
            if norm.spec.weight
        },
        renames=names.renames,
        embedding_path=names.embedding,
        head_path=names.head,
        other_paths=frozenset(
            (
                *(path for path in layout.tables if path != names.embedding),
                *(stack.module for stack in stacks),
                *(parameter.name for layer in layout.layers for parameter in layer.parameters.values()),
            )
        ),
        unused_modules=names.unused_modules,
        default_targets=names.default_targets,
        ia3_targets=names.ia3_targets,
        ia3_feedforward=names.ia3_feedforward,
        ln_tuning_targets=names.ln_tuning_targets,
        vocab_size=spec.vocab_size,
        embedding_size=spec.embedding_size,
        tied_head=spec.head.tied,
        has_token_inputs=spec.layer_inputs is not None,
        key_shapes=tuple(
            (layer.attention.num_kv_heads, layer.attention.head_dim)
            for layer in spec.layers
            if layer.attention.kv_layer is None
        ),
        layer_paths=tuple(
            names.linears["output"][0].partition("{}")[0] + str(index) for index in range(len(spec.layers))
        ),
        interchangeable_layers=_are_interchangeable(spec),
    )


def _parameter_routers(layout: ModelLayout, names: NameMap) -> dict[str, LinearSite]:
    if names.experts is None or names.experts.linear_router:
        return {}
    return _linear_sites(layer.linears["router"] for layer in layout.layers if "router" in layer.linears)


def _are_interchangeable(spec: ModelSpec) -> bool:
    attentions = [layer.attention for layer in spec.layers]
    cached = {(attention.num_kv_heads, attention.head_dim, attention.window) for attention in attentions}
    borrows = any(attention.kv_layer is not None for attention in attentions)
    return len(cached) == 1 and not borrows and spec.layer_inputs is None


def _linear_sites(layers: Iterable[LinearLayout]) -> dict[str, LinearSite]:
    sites: dict[str, LinearSite] = {}
    for layer in layers:
        start = 0
        for module in layer.modules:
            sites[module.path] = LinearSite(
                path=module.path,
                slot=layer.slot,
                start=start,
                stop=start + module.rows,
                in_features=layer.in_features,
                transposed=module.transposed,
            )
            start += module.rows
    return sites


def _stacked_sites(stack: ExpertStackLayout) -> list[LinearSite]:
    """A site for each expert's matrix in a stack, which is a whole layer."""
    return [
        LinearSite(
            path=f"{stack.name}.{expert}",
            slot=layer.slot,
            start=0,
            stop=sum(module.rows for module in layer.modules),
            in_features=layer.in_features,
            transposed=stack.transposed,
        )
        for expert, layer in enumerate(stack.layers)
    ]
