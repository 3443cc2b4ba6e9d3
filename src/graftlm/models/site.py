"""Where adapters can attach: modules under the family's own names, and the rows of the fused layers they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graftlm.layers.patch import Slot
from graftlm.models.spec import LayerRole, LayerSpec, ModelSpec, NameMap

# Roles whose projections are stacked in one layer, in stacking order.
FUSED_ROLES: dict[str, tuple[LayerRole, ...]] = {
    "qkv": ("q", "k", "v"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
HEAD_SLOT = Slot("head")


@dataclass(frozen=True, kw_only=True)
class LinearSite:
    """Output rows [start, stop) of the linear layer `slot`, known to PEFT under `path`."""

    path: str
    slot: Slot
    start: int
    stop: int
    in_features: int

    @property
    def out_features(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class SiteMap:
    """Every module of a model that an adapter can name.

    linears: path -> site, in model order, the output head last.
    module_paths: all modules with weights, adaptable or not.
    default_targets: what PEFT targets when a config names nothing.
    """

    linears: Mapping[str, LinearSite]
    module_paths: frozenset[str]
    head_path: str
    default_targets: tuple[str, ...]


def layer_slot(index: int, group: str) -> Slot:
    """Name of a fused layer of block `index`; `group` is a key of FUSED_ROLES."""
    return Slot(f"layers.{index}.{group}")


def map_sites(spec: ModelSpec, names: NameMap) -> SiteMap:
    """The sites of a model, from its spec alone: no weight is read."""
    linears: dict[str, LinearSite] = {}
    for index, layer in enumerate(spec.layers):
        for group, roles in FUSED_ROLES.items():
            start = 0
            for role in roles:
                out_features, in_features = linear_shape(role, layer, spec.hidden_size)
                path = names.layer[role].format(index)
                linears[path] = LinearSite(
                    path=path,
                    slot=layer_slot(index, group),
                    start=start,
                    stop=start + out_features,
                    in_features=in_features,
                )
                start += out_features
    linears[names.head] = LinearSite(
        path=names.head, slot=HEAD_SLOT, start=0, stop=spec.vocab_size, in_features=spec.hidden_size
    )
    norms = {
        names.layer[role].format(index)
        for role in ("pre_attention_norm", "pre_mlp_norm")
        for index in range(len(spec.layers))
    }
    return SiteMap(
        linears=linears,
        module_paths=frozenset({names.embedding, names.final_norm, *norms, *linears}),
        head_path=names.head,
        default_targets=names.default_targets,
    )


def linear_shape(role: LayerRole, layer: LayerSpec, hidden_size: int) -> tuple[int, int]:
    """(out, in) of one projection."""
    attention, mlp = layer.attention, layer.mlp
    query_size = attention.num_heads * attention.head_dim
    key_size = attention.num_kv_heads * attention.head_dim
    shapes: dict[LayerRole, tuple[int, int]] = {
        "q": (query_size, hidden_size),
        "k": (key_size, hidden_size),
        "v": (key_size, hidden_size),
        "output": (hidden_size, query_size),
        "gate": (mlp.intermediate_size, hidden_size),
        "up": (mlp.intermediate_size, hidden_size),
        "down": (hidden_size, mlp.intermediate_size),
    }
    return shapes[role]
