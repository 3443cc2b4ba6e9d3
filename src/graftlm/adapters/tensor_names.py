"""Names of an adapter's tensors, in the spellings found in the wild, to (module, role).

PEFT writes `base_model.model.<module>.lora_A.weight`; trainers add wrapper segments, the adapter's name, or leave the
prefix out. What can be read in one way only is read; everything else is refused by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from graftlm.errors import AdapterUnsupported

Role = Literal["lora_A", "lora_B"]

PEFT_PREFIX = "base_model.model."
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_LORA = re.compile(r"(?P<module>.+)\.(?P<role>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.weight")


class TensorName(NamedTuple):
    module: str
    role: Role


def parse_tensor_name(name: str, module_paths: Collection[str]) -> TensorName | None:
    """Module and role of a LoRA tensor; None when the name cannot be traced to a module of the base.

    Raises:
        AdapterUnsupported: the tensor is of a kind Graft does not serve (a saved module, a bias, a magnitude, …).
    """
    match = _LORA.fullmatch(name)
    if match is None:
        raise AdapterUnsupported(
            f"tensor {name} is not a LoRA pair's half", allowed="lora_A.weight and lora_B.weight of linear modules"
        )
    module = resolve_module(match.group("module"), module_paths)
    role: Role = "lora_A" if match.group("role") == "lora_A" else "lora_B"
    return None if module is None else TensorName(module, role)


def resolve_module(path: str, module_paths: Collection[str]) -> str | None:
    """The base's module that `path` means, or None."""
    path = ".".join(segment for segment in path.split(".") if segment not in WRAPPERS)
    while path.startswith(PEFT_PREFIX):
        path = path.removeprefix(PEFT_PREFIX)
    without_language_model = path.replace("language_model.", "")
    candidates = {
        path,
        f"model.{path}",
        without_language_model,
        f"model.{without_language_model}",
        f"model.{path.removeprefix('base_model.')}",
    }
    found = candidates & set(module_paths)
    return found.pop() if len(found) == 1 else None
