"""The tensors a model needs, compared with those a checkpoint has."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.errors import CheckpointError
from graftlm.models.layout import LinearLayout, ModelLayout, NormLayout
from graftlm.models.spec import NameMap

logger = logging.getLogger(__name__)


class NamedTensors:
    """A checkpoint's tensors under the names the family has in memory.

    Files leave out the base model's prefix ("h.0." for "transformer.h.0."), and libraries rename modules while the
    files keep the old names; `NameMap.renames` says how.

    Raises:
        CheckpointError: two tensors would get the same name.
    """

    def __init__(self, checkpoint: Checkpoint, names: NameMap) -> None:
        self.checkpoint = checkpoint
        self._stored: dict[str, str] = {}
        prefix = names.embedding.split(".")[0] + "."
        renamed = {stored: _rename(stored, names) for stored in sorted(checkpoint.tensor_names())}
        lacks_prefix = not any(name.startswith(prefix) for name in renamed.values())
        for stored, name in renamed.items():
            full_name = prefix + name if lacks_prefix and not name.startswith(f"{names.head}.") else name
            if full_name in self._stored:
                raise CheckpointError(f"two tensors are {full_name}", got=f"{self._stored[full_name]}, {stored}")
            self._stored[full_name] = stored
        self._stored_paths = _stored_paths(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def stored_name(self, name: str) -> str:
        """What a tensor is called in the file."""
        return self._stored[name]

    def stored_path(self, path: str) -> str:
        """What a module is called in the file; its own path where the file has nothing of it."""
        return self._stored_paths.get(path, path)

    def parts(self, path: str) -> frozenset[str]:
        """What follows a module's path in the names of its tensors: "weight", "bias", "weight.absmax"."""
        start = f"{path}."
        return frozenset(name.removeprefix(start) for name in self._stored if name.startswith(start))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(self._stored[name])

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(self._stored[name])

    def read_stored(self, name: str) -> Tensor:
        return self.checkpoint.read_stored(self._stored[name])


def _rename(name: str, names: NameMap) -> str:
    for pattern, replacement in names.renames:
        name = re.sub(pattern, replacement, name)
    return name


def _stored_paths(stored: Mapping[str, str]) -> dict[str, str]:
    """The path in the file of everything that is before a dot in a tensor's name and is followed by the same there."""
    paths: dict[str, str] = {}
    for name, stored_name in stored.items():
        for dot in (index for index, letter in enumerate(name) if letter == "."):
            if stored_name.endswith(name[dot:]):
                paths.setdefault(name[:dot], stored_name.removesuffix(name[dot:]))
    return paths


def has_tied_head(tensors: NamedTensors, names: NameMap, *, tied: bool) -> bool:
    """Whether the head is the embedding table.

    A head that is in the file although the config ties it counts as tied only if it equals the embedding: transformers
    5 does not tie two different matrices either.

    Args:
        tied: what the config says.
    """
    parts = tensors.parts(names.head) - {"bias"}
    if not tied or not parts:
        return tied
    if parts == tensors.parts(names.embedding) and all(
        _are_equal(tensors, f"{names.head}.{part}", f"{names.embedding}.{part}") for part in parts
    ):
        return True
    logger.warning("config.json ties the head, but %s differs from the embedding: using it untied", names.head)
    return False


def _are_equal(tensors: NamedTensors, one: str, other: str) -> bool:
    if tensors.shape(one) != tensors.shape(other):
        return False
    first, second = tensors.read_stored(one), tensors.read_stored(other)
    return first.dtype == second.dtype and torch.equal(first, second)


def expected_shapes(layout: ModelLayout, *, tied_head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor a model needs, with its shape as stored. A tied head has no matrix of its own."""
    shapes: dict[str, tuple[int, ...]] = {f"{path}.weight": shape for path, shape in layout.tables.items()}
    for linear in layout.linears():
        shapes.update(_linear_shapes(linear))
    for layer in layout.layers:
        shapes.update((parameter.name, parameter.shape) for parameter in layer.parameters.values())
    for norm in layout.norms():
        shapes.update(_norm_shapes(norm))
    head = _linear_shapes(layout.head)
    if tied_head:
        del head[f"{layout.head.modules[0].path}.weight"]
    return {**shapes, **head}


def check_tensors(
    tensors: NamedTensors, expected: Mapping[str, tuple[int, ...]], names: NameMap, *, claimed: Collection[str] = ()
) -> None:
    """Compare what the spec needs with what is there.

    Args:
        claimed: names in the file of tensors that belong to quantised matrices; their format checks them.

    Raises:
        CheckpointError: lists every missing, unknown and misshapen tensor (the first ten of each kind).
    """
    missing = sorted(name for name in expected if name not in tensors)
    unused = (rf"({module})\..*" for module in names.unused_modules)
    allowed_extra = re.compile("|".join((*names.ignored_tensors, *unused, re.escape(f"{names.head}.weight"))))
    extra = {
        tensors.stored_name(name) for name in tensors.names() - expected.keys() if not allowed_extra.fullmatch(name)
    }
    unknown = sorted(extra.difference(claimed))
    misshapen = [
        f"{tensors.stored_name(name)} {list(tensors.shape(name))} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors.shape(name) != shape
    ]
    problems = [
        f"{kind}: {', '.join(found[:10])}" + (f" and {len(found) - 10} more" if len(found) > 10 else "")
        for kind, found in (("missing", missing), ("unknown", unknown), ("misshapen", misshapen))
        if found
    ]
    if problems:
        raise CheckpointError("the checkpoint's tensors do not fit its config", got="; ".join(problems))


def _linear_shapes(linear: LinearLayout) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for module in linear.modules:
        shapes[module.tensor("weight")] = module.stored_shape(module.rows, linear.in_features)
        if linear.bias:
            shapes[module.tensor("bias")] = module.stored_shape(module.rows)
    return shapes


def _norm_shapes(norm: NormLayout) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if norm.spec.weight:
        shapes[f"{norm.path}.weight"] = (norm.size,)
    if norm.spec.bias:
        shapes[f"{norm.path}.bias"] = (norm.size,)
    return shapes
