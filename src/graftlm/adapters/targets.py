"""Which modules a config selects, by PEFT's rules.

Source: peft/tuners/tuners_utils.py, check_target_module_exists (0.21).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from graftlm.adapters.patterns import ANY_LAYER_INDEX, FULL_NAME, LAYER_INDEX, pattern_match
from graftlm.adapters.target_config import TargetConfig
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from graftlm.models.site import SiteMap


def select_targets(config: TargetConfig, sites: SiteMap, adaptable: Collection[str]) -> frozenset[str]:
    """Paths of the modules the config targets.

    Args:
        adaptable: the modules that the method is defined for; among them, experts' modules that only older files name.

    Raises:
        AdapterUnsupported: it also targets others, as PEFT refuses to.
    """
    config = _with_present_names(config, sites)
    adaptable = frozenset(adaptable)
    selected = frozenset(path for path in sites.module_paths | adaptable if _is_target(config, path, sites, adaptable))
    unsupported = sorted(selected - adaptable)
    if unsupported:
        raise AdapterUnsupported(
            f"target_modules names modules that this method cannot adapt: {', '.join(unsupported[:5])}"
        )
    return selected


def with_default_targets(config: TargetConfig, defaults: tuple[str, ...]) -> TargetConfig:
    """The config with a method's own default targets, if it names none.

    Raises:
        AdapterUnsupported: there is no default for this architecture.
    """
    if config.target_modules is not None:
        return config
    if not defaults:
        raise AdapterUnsupported(
            "adapter_config.json: target_modules is missing, and PEFT has no default of this method for this base"
        )
    return replace(config, target_modules=defaults)


def check_target(config: TargetConfig, sites: SiteMap, targets: frozenset[str], module: str) -> None:
    """Raise if a module that the weights hold is not a target.

    PEFT ignores tensors of modules the config does not target; serving without them would be another adapter.

    Raises:
        AdapterIncompatible
    """
    if module in targets:
        return
    raise AdapterIncompatible(
        f"the weights hold {module}, which the config does not target",
        got=f"target_modules={config.target_modules!r}"[:200],
        allowed=f"targets among the modules of this base, such as {next(iter(sites.linears))}",
    )


def is_saved(config: TargetConfig, path: str) -> bool:
    """Whether `modules_to_save` covers a module, itself or through a module that holds it.

    PEFT compares with a bare `endswith`, not at a dot: "norm" means every module whose name ends in norm.
    Source: peft/utils/other.py, _set_trainable.
    """
    parts = path.split(".")
    holders = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(holder.endswith(name) for name in config.modules_to_save for holder in holders)


def _with_present_names(config: TargetConfig, sites: SiteMap) -> TargetConfig:
    """Lists of names with the modules' present names in place of older ones."""
    names = config.target_modules
    if names is None or isinstance(names, str):
        return config
    for pattern, replacement in sites.renames:
        names = tuple(re.sub(pattern, replacement, name) for name in names)
    return replace(config, target_modules=names)


def _is_target(config: TargetConfig, path: str, sites: SiteMap, adaptable: Collection[str]) -> bool:
    targets = config.target_modules
    if any(path == name or f".{path}.".find(f".{name}.") >= 0 for name in config.modules_to_save):
        return False
    if config.exclude_modules is not None and _names(config.exclude_modules, path):
        return False
    if targets is None:
        targets = sites.default_targets
    if isinstance(targets, str) and targets.lower() == "all-linear":
        is_linear = path in sites.linears or (path in sites.matrices and path in adaptable)
        return is_linear and path != sites.head_path
    if not _names(targets, path):
        return False
    if path in targets or not config.layers_to_transform:
        # A full module name escapes the restriction to certain layers.
        return True
    return _layer_index(path, config.layers_pattern) in config.layers_to_transform


def _names(names: tuple[str, ...] | str, path: str) -> bool:
    """A string is a regular expression for the whole path; a list entry is the path or its end after a dot."""
    if isinstance(names, str):
        return pattern_match(FULL_NAME, names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _layer_index(path: str, layers_pattern: tuple[str, ...]) -> int | None:
    if not layers_pattern:
        match = pattern_match(ANY_LAYER_INDEX, "", path)
    else:
        matches = (pattern_match(LAYER_INDEX, pattern, path) for pattern in layers_pattern)
        match = next((match for match in matches if match is not None), None)
    index = None if match is None else match.group("index")
    return None if index is None else int(index)
