"""Where adapters can attach: modules under the family's own names, and the rows of the fused layers they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graftlm.layers.patch import Slot
from graftlm.models.layout import LinearLayout, ModelLayout, lay_out
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
class NormSite:
    """The norm `slot`, `size` wide. has_bias: besides its weight."""

    path: str
    slot: Slot
    size: int
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class SiteMap:
    """Every module of a model that an adapter can name.

    linears: path -> site, in model order, the output head last.
    norms: path -> site. other_paths: modules with weights that no adapter can change (position tables).
    default_targets, ia3_targets, ia3_feedforward, ln_tuning_targets: what PEFT targets when a config names nothing, as
        in `NameMap`.
    tied_head: whether embedding and head share one matrix. embedding_size: width of a row of either.
    """

    linears: Mapping[str, LinearSite]
    norms: Mapping[str, NormSite]
    embedding_path: str
    head_path: str
    other_paths: frozenset[str]
    default_targets: tuple[str, ...]
    ia3_targets: tuple[str, ...]
    ia3_feedforward: tuple[str, ...]
    ln_tuning_targets: tuple[str, ...]
    vocab_size: int
    embedding_size: int
    tied_head: bool

    @property
    def plain_linears(self) -> frozenset[str]:
        """Linear modules that are no Conv1D, for which PEFT does not define many methods."""
        return frozenset(path for path, site in self.linears.items() if not site.transposed)

    @property
    def module_paths(self) -> frozenset[str]:
        """All modules with weights."""
        return frozenset({self.embedding_path, *self.norms, *self.linears, *self.other_paths})


def map_sites(spec: ModelSpec, names: NameMap) -> SiteMap:
    """The sites of a model, from its spec alone: no weight is read."""
    layout = lay_out(spec, names)
    return SiteMap(
        linears=_linear_sites(layout),
        norms={
            norm.path: NormSite(path=norm.path, slot=norm.slot, size=norm.size, has_bias=norm.spec.bias)
            for norm in layout.norms()
            if norm.spec.weight
        },
        embedding_path=names.embedding,
        head_path=names.head,
        other_paths=frozenset(layout.tables) - {names.embedding},
        default_targets=names.default_targets,
        ia3_targets=names.ia3_targets,
        ia3_feedforward=names.ia3_feedforward,
        ln_tuning_targets=names.ln_tuning_targets,
        vocab_size=spec.vocab_size,
        embedding_size=spec.embedding_size,
        tied_head=spec.head.tied,
    )


def _linear_sites(layout: ModelLayout) -> dict[str, LinearSite]:
    layers: list[LinearLayout] = [*layout.linears(), layout.head]
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
