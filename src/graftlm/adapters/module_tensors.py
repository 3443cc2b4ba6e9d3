"""An adapter's tensors by module and role, in the spellings found in the wild.

PEFT writes `base_model.model.<module>.<role>`; trainers add wrapper segments or the adapter's name, or leave the prefix
out. What can be read in one way only is read. Every tensor has to be taken by the method that understands it: what is
left at the end refuses the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from graftlm.models.site import SiteMap

PEFT_PREFIX = "base_model.model."
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Module of tensors that belong to no single module of the base (VeRA's projections, virtual tokens).
WHOLE_MODEL = ""
# The adapter's own name, which raw state dicts carry: lora_A.default.weight, modules_to_save.default.weight.
_NAMED = (
    (
        re.compile(r"(lora_[AB]|lora_embedding_[AB]|vera_lambda_[bd]|oft_R|ln_tuning_layers)\.[^.]+\.(weight|bias)"),
        r"\1.\2",
    ),
    (re.compile(r"(ia3_l|boft_[Rs]|hra_u|road_(?:theta|alpha)|trainable_tokens_delta)\.[^.]+"), r"\1"),
    (re.compile(r"(lora_embedding_[AB]|lora_magnitude_vector)\.(?!weight$)[^.]+(\.weight)?"), r"\1"),
    (re.compile(r"(modules_to_save)\.(?!weight$|bias$)[^.]+\.(weight|bias)"), r"\1.\2"),
    (re.compile(r"lora_magnitude_vector\.weight"), "lora_magnitude_vector"),
)


class ModuleTensors:
    """Tensors to be taken one by one. `total` counts those in the file, `unused` those of modules that no text passes
    through (a vision tower): they cannot change an answer.

    Args:
        tensors: the file's names. sites: the modules of the base.

    Raises:
        AdapterIncompatible: names that no module of the base answers to.
        AdapterCorrupt: two names mean the same tensor, or there are none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sites: SiteMap) -> None:
        if not tensors:
            raise AdapterCorrupt("the adapter's weights file holds no tensors")
        self.total = len(tensors)
        self.unused = 0
        self._left: dict[str, dict[str, tuple[str, Tensor]]] = {}
        homeless = []
        for name in sorted(tensors):
            located = locate(name, sites.known_paths, sites.renames)
            if located is None and _is_of(name, sites.unused_modules):
                self.unused += 1
                continue
            if located is None:
                homeless.append(name)
                continue
            module, role = located
            roles = self._left.setdefault(module, {})
            if role in roles:
                raise AdapterCorrupt(f"two tensors are {role} of {module}", got=f"{roles[role][0]}, {name}")
            roles[role] = (name, tensors[name])
        if homeless:
            raise AdapterIncompatible(
                f"{len(homeless)} of {len(tensors)} tensors name no module of this base: {', '.join(homeless[:5])}",
                do="load it over the base it was trained on",
            )

    def modules_with(self, *roles: str) -> list[str]:
        """Modules that still have a tensor of any of these roles."""
        return [module for module, left in self._left.items() if not left.keys().isdisjoint(roles)]

    def take(self, module: str, role: str) -> Tensor | None:
        """The tensor, which then counts as used; None when there is none."""
        entry = self._left.get(module, {}).pop(role, None)
        return None if entry is None else entry[1]

    def require(self, module: str, role: str) -> Tensor:
        """The tensor, which then counts as used.

        Raises:
            AdapterCorrupt: it is missing.
        """
        tensor = self.take(module, role)
        if tensor is None:
            raise AdapterCorrupt(f"{role.removesuffix('.weight')} of {module or 'the model'} is missing")
        return tensor

    def drop(self, role: str) -> None:
        """Discard all tensors of a role that is known to change nothing."""
        for roles in self._left.values():
            roles.pop(role, None)

    def check_all_taken(self) -> None:
        """Raise if a tensor is left that no method understood.

        Raises:
            AdapterUnsupported
        """
        left = sorted(name for roles in self._left.values() for name, _ in roles.values())
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise AdapterUnsupported(
                f"{len(left)} of {self.total} tensors have no meaning for this adapter: {', '.join(left[:5])}{more}",
                do="check that the adapter's config belongs to these weights",
            )


def locate(name: str, module_paths: Collection[str], renames: Sequence[tuple[str, str]] = ()) -> tuple[str, str] | None:
    """Module of the base and role of a tensor; None when the name cannot be traced to one module."""
    path = _unwrapped(name)
    bare = path.removeprefix("base_model.")
    if "." not in bare:
        return WHOLE_MODEL, bare
    spellings = _spellings(path)
    for old, new in renames:
        spellings |= {re.sub(old, new, spelling) for spelling in spellings}
    found = {split for spelling in spellings if (split := _split(spelling, module_paths)) is not None}
    if len(found) != 1:
        return None
    module, role = found.pop()
    for pattern, replacement in _NAMED:
        if pattern.fullmatch(role):
            role = pattern.sub(replacement, role)
    return module, role


def _unwrapped(name: str) -> str:
    path = ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)
    while path.startswith(PEFT_PREFIX):
        path = path.removeprefix(PEFT_PREFIX)
    return path


def _spellings(path: str) -> set[str]:
    """What a module may be called in a base that keeps its text model inside another model, or does not."""
    bare = path.removeprefix("base_model.")
    inner = path.replace("language_model.", "").removeprefix("model.")
    return {path, f"model.{path}", f"model.{bare}", inner, f"model.{inner}", f"model.language_model.{inner}"}


def _is_of(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor belongs to one of the modules, which are regular expressions, or to a module inside one."""
    spellings = _spellings(_unwrapped(name))
    return any(re.match(rf"({module})\.", spelling) for module in modules for spelling in spellings)


def _split(path: str, module_paths: Collection[str]) -> tuple[str, str] | None:
    """Longest beginning of `path` that is a module, and the rest."""
    segments = path.split(".")
    for length in range(len(segments) - 1, 0, -1):
        module = ".".join(segments[:length])
        if module in module_paths:
            return module, ".".join(segments[length:])
    return None


def check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor fits this base.

    Raises:
        AdapterIncompatible
    """
    if tuple(tensor.shape) != shape:
        raise AdapterIncompatible(
            f"{what} has another shape in this base", got=list(tensor.shape), allowed=str(list(shape))
        )
