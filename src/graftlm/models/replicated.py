"""A base with its layers in another order, some more than once or left out: the same weights under other names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from graftlm.layers.patch import LayerStack, LinearPatch, ModelPatch, NormPatch, Slot
from graftlm.models.base_weights import BaseWeights
from graftlm.models.layout import layer_slot, split_layer_slot
from graftlm.models.site import ExpertStack, SiteMap
from graftlm.quantization import Weight

P = TypeVar("P")


class ReplicatedWeights:
    """`BaseWeights` of the model that has layer `layers[d]` of `base` at depth d. Nothing is copied.

    Its slots are of layers that the decoder may not have; `stacked` brings a patch back to those it has.
    """

    def __init__(self, base: BaseWeights, layers: Sequence[int]) -> None:
        self.dtype = base.dtype
        self.device = base.device
        self._base = base
        self._layers = tuple(layers)
        self._names = _LayerNames(base.sites, self._layers)
        self.sites = _replicate(base.sites, self._names, len(self._layers))

    def linear(self, path: str) -> Weight:
        return self._base.linear(self._names.original(path))

    def bias(self, path: str) -> Tensor | None:
        return self._base.bias(self._names.original(path))

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        return self._base.norm(self._names.original(path))

    def embedding(self) -> Tensor:
        return self._base.embedding()

    def stacked(self, patch: ModelPatch) -> ModelPatch:
        """What a patch of this model does, with the decoder's own slots at each depth."""
        linears: list[dict[Slot, LinearPatch]] = [{} for _ in self._layers]
        norms: list[dict[Slot, NormPatch]] = [{} for _ in self._layers]
        outer_linears = self._split(patch.linears, linears)
        outer_norms = self._split(patch.norms, norms)
        patches = tuple(ModelPatch(linears=linears[depth], norms=norms[depth]) for depth in range(len(self._layers)))
        stack = LayerStack(layers=self._layers, patches=patches)
        return replace(patch, linears=outer_linears, norms=outer_norms, stack=stack)

    def _split(self, patches: Mapping[Slot, P], by_depth: Sequence[dict[Slot, P]]) -> dict[Slot, P]:
        """Share out what is inside the layers; what is outside is left."""
        outer: dict[Slot, P] = {}
        for slot, patch in patches.items():
            split = split_layer_slot(slot)
            if split is None:
                outer[slot] = patch
            else:
                depth, name = split
                by_depth[depth][layer_slot(self._layers[depth], name)] = patch
        return outer


class _LayerNames:
    """Which module of the base a module of the replicated model is."""

    def __init__(self, sites: SiteMap, layers: Sequence[int]) -> None:
        self._stem = sites.layer_paths[0].removesuffix("0")
        self._layers = tuple(layers)

    def original(self, path: str) -> str:
        """A module's path in the base."""
        split = self._split(path)
        return path if split is None else f"{self._stem}{self._layers[split[0]]}.{split[1]}"

    def at_depth(self, path: str, depth: int) -> str:
        """A module's path, of whatever layer it is, when the layer stands at `depth`."""
        split = self._split(path)
        return path if split is None else f"{self._stem}{depth}.{split[1]}"

    def spread(self, paths: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Paths in the replicated model -> path in the base, and the depth, which has no meaning outside the layers.

        Args:
            paths: of the base, in its order, which is that of the result too.
        """
        paths = list(paths)
        by_layer: dict[int, list[str]] = defaultdict(list)
        for path in paths:
            if (split := self._split(path)) is not None:
                by_layer[split[0]].append(path)
        inner = {
            self.at_depth(path, depth): (path, depth)
            for depth, layer in enumerate(self._layers)
            for path in by_layer[layer]
        }
        spread: dict[str, tuple[str, int]] = {}
        for path in paths:
            spread |= {path: (path, 0)} if self._split(path) is None else inner
        return spread

    def _split(self, path: str) -> tuple[int, str] | None:
        """Index of a module's layer, and its name there."""
        if not path.startswith(self._stem):
            return None
        index, _, name = path.removeprefix(self._stem).partition(".")
        return int(index), name


def _replicate(sites: SiteMap, names: _LayerNames, num_layers: int) -> SiteMap:
    matrices = {
        path: replace(sites.matrices[original], path=path, slot=_slot_at(sites.matrices[original].slot, depth))
        for path, (original, depth) in names.spread(sites.matrices).items()
    }
    return replace(
        sites,
        matrices=matrices,
        linears={path: matrices[path] for path in names.spread(sites.linears)},
        routers=frozenset(names.spread(sites.routers)),
        expert_modules=frozenset(names.spread(sites.expert_modules)),
        expert_stacks={
            path: _stack_at(sites.expert_stacks[original], depth, names)
            for path, (original, depth) in names.spread(sites.expert_stacks).items()
        },
        norms={
            path: replace(sites.norms[original], path=path, slot=_slot_at(sites.norms[original].slot, depth))
            for path, (original, depth) in names.spread(sites.norms).items()
        },
        other_paths=frozenset(names.spread(sites.other_paths)),
        # Those of interchangeable layers are all the same.
        key_shapes=sites.key_shapes[:1] * num_layers,
        layer_paths=tuple(sites.layer_paths[0].removesuffix("0") + str(depth) for depth in range(num_layers)),
    )


def _slot_at(slot: Slot, depth: int) -> Slot:
    split = split_layer_slot(slot)
    return slot if split is None else layer_slot(depth, split[1])


def _stack_at(stack: ExpertStack, depth: int, names: _LayerNames) -> ExpertStack:
    return replace(
        stack,
        path=names.at_depth(stack.path, depth),
        module=names.at_depth(stack.module, depth),
        experts=tuple(names.at_depth(path, depth) for path in stack.experts),
    )
