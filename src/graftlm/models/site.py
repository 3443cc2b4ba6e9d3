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
FINAL_NORM_SLOT = Slot("final_norm")
NORM_ROLES: tuple[LayerRole, ...] = ("pre_attention_norm", "pre_mlp_norm")


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
    norms: path -> slot. default_targets, ia3_targets, ia3_feedforward, ln_tuning_targets: what PEFT targets when a
        config names nothing, as in `NameMap`.
    tied_head: whether embedding and head share one matrix.
    """

    linears: Mapping[str, LinearSite]
    norms: Mapping[str, Slot]
    embedding_path: str
    head_path: str
    default_targets: tuple[str, ...]
    ia3_targets: tuple[str, ...]
    ia3_feedforward: tuple[str, ...]
    ln_tuning_targets: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    tied_head: bool

    @property
    def module_paths(self) -> frozenset[str]:
        """All modules with weights."""
        return frozenset({self.embedding_path, *self.norms, *self.linears})


def layer_slot(index: int, group: str) -> Slot:
    """Name of a layer of block `index`; `group` is a key of FUSED_ROLES or one of NORM_ROLES."""
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
        names.layer[role].format(index): layer_slot(index, role)
        for index in range(len(spec.layers))
        for role in NORM_ROLES
    }
    return SiteMap(
        linears=linears,
        norms={**norms, names.final_norm: FINAL_NORM_SLOT},
        embedding_path=names.embedding,
        head_path=names.head,
        default_targets=names.default_targets,
        ia3_targets=names.ia3_targets,
        ia3_feedforward=names.ia3_feedforward,
        ln_tuning_targets=names.ln_tuning_targets,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        tied_head=spec.tied_head,
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
