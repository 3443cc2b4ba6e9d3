"""What an adapter folder holds, for people: readable even when Graft would refuse to serve it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graftlm.adapters.config import LoraConfig, parse_lora_config
from graftlm.adapters.files import read_adapter_files
from graftlm.adapters.methods import find_method
from graftlm.adapters.module_tensors import PEFT_PREFIX
from graftlm.adapters.text import TOKENIZER_FILES
from graftlm.errors import AdapterError

# Everything PEFT appends to a module's path, from the first such component on.
_ROLE = re.compile(
    r"\.((?:lora|vera|hada|lokr|miss|delora|vblora|gralora|hira|shira|c3a|fourierft|ia3|ln_tuning|oft|boft|road|hra)_"
    r"|trainable_tokens_delta|token_adapter|modules_to_save|base_layer|original_module|weight$|bias$).*"
)
_INSPECTION_LIMIT = 64 << 30


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """One module of an adapter file.

    tensors: role -> shape, such as {"lora_A.weight": (8, 576), …}.
    rank and scaling: None where they have no meaning or the config cannot be read.
    """

    path: str
    tensors: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    num_bytes: int
    rank: int | None
    scaling: float | None


@dataclass(frozen=True, kw_only=True)
class AdapterReport:
    """refusal: why Graft does not serve this adapter on any base; None when nothing speaks against it."""

    digest: str
    method: str
    trained_on: str | None
    peft_version: str | None
    modules: tuple[ModuleReport, ...]
    text_files: tuple[str, ...]
    refusal: str | None

    @property
    def num_tensors(self) -> int:
        return sum(len(module.tensors) for module in self.modules)

    @property
    def num_bytes(self) -> int:
        return sum(module.num_bytes for module in self.modules)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({dtype for module in self.modules for dtype in module.dtypes}))


def inspect_adapter(source: str | Path, *, allow_pickle: bool = False) -> AdapterReport:
    """Describe an adapter folder.

    Raises:
        AdapterError: its files are missing or damaged.
    """
    files = read_adapter_files(source, max_bytes=_INSPECTION_LIMIT, allow_pickle=allow_pickle)
    config, refusal = _parse(files.config)
    return AdapterReport(
        digest=files.digest,
        method=_method(files.config),
        trained_on=files.config.get("base_model_name_or_path"),
        peft_version=files.config.get("peft_version"),
        modules=_modules(files.tensors, config),
        text_files=tuple(name for name in TOKENIZER_FILES if (files.weights_path.parent / name).is_file()),
        refusal=refusal,
    )


def _parse(raw: Mapping[str, Any]) -> tuple[LoraConfig | None, str | None]:
    """A LoRA's config, and what speaks against the adapter. Other methods read theirs together with the weights."""
    try:
        find_method(raw.get("peft_type"))
        return (parse_lora_config(raw) if raw["peft_type"] == "LORA" else None), None
    except AdapterError as error:
        return None, str(error)


def _method(raw: Mapping[str, Any]) -> str:
    """PEFT's name for the method with the variants its flags turn on."""
    method = str(raw.get("peft_type", "unknown"))
    variants = [name for flag, name in (("use_rslora", "rsLoRA"), ("use_dora", "DoRA")) if raw.get(flag)]
    return " + ".join([method, *variants])


def _modules(tensors: Mapping[str, Tensor], config: LoraConfig | None) -> tuple[ModuleReport, ...]:
    grouped: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors, key=_natural_order):
        path = name.removeprefix(PEFT_PREFIX)
        module = _ROLE.sub("", path)
        grouped.setdefault(module, {})[path.removeprefix(module).removeprefix(".") or "tensor"] = tensors[name]
    return tuple(_module(path, roles, config) for path, roles in grouped.items())


def _module(path: str, roles: Mapping[str, Tensor], config: LoraConfig | None) -> ModuleReport:
    lora_a = next((tensor for role, tensor in roles.items() if role.startswith("lora_A")), None)
    rank = lora_a.shape[0] if lora_a is not None and lora_a.dim() == 2 else None
    return ModuleReport(
        path=path,
        tensors={role: tuple(tensor.shape) for role, tensor in roles.items()},
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in roles.values()})),
        num_bytes=sum(tensor.nbytes for tensor in roles.values()),
        rank=rank,
        scaling=config.scaling_of(path, rank) if config is not None and rank else None,
    )


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
