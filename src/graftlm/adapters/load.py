"""From an adapter folder to an `Adapter`: strict, complete, or an error that names what is wrong."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.adapters.adapter import Adapter
from graftlm.adapters.config import LoraConfig, parse_lora_config
from graftlm.adapters.files import read_adapter_files
from graftlm.adapters.methods.lora import LoraPair, compile_lora
from graftlm.adapters.targets import select_targets
from graftlm.adapters.tensor_names import Role, parse_tensor_name
from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from graftlm.models.site import SiteMap

logger = logging.getLogger(__name__)

ADAPTER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_adapter(
    name: str,
    source: str | Path,
    sites: SiteMap,
    *,
    device: torch.device,
    max_bytes: int,
    allow_pickle: bool = False,
) -> Adapter:
    """Read an adapter, check all of it against a base, and compile it.

    Every config field is read or refused and every tensor is bound to a module; an adapter of which any part would be
    left out is refused rather than served as something else.

    Args:
        source: folder, weights file or hub id.
        max_bytes: larger weight files are refused unread.

    Raises:
        AdapterError: a subclass that says which file, field or tensor is at fault.
    """
    files = read_adapter_files(source, max_bytes=max_bytes, allow_pickle=allow_pickle)
    config = parse_lora_config(files.config)
    _check_values(files.tensors)
    selected = select_targets(config, sites)
    pairs = pair_tensors(files.tensors, sites)
    _check_targets(config, pairs, selected, sites)
    patches, modules = compile_lora(config, pairs, sites, device)
    logger.info("adapter %s: bound %d of %d tensors", name, 2 * len(modules), len(files.tensors))
    if absent := sorted(selected - pairs.keys()):
        # What PEFT does as well: a targeted module whose tensors are missing stays as the base has it.
        logger.warning("adapter %s has no tensors for %d of its targets: %s", name, len(absent), ", ".join(absent[:5]))
    if files.text_files:
        logger.warning("adapter %s: %s not used; the base's tokenizer serves it", name, ", ".join(files.text_files))
    return Adapter(
        name=name,
        digest=files.digest,
        method="rsLoRA" if config.use_rslora else "LoRA",
        modules=modules,
        patches=patches,
        bound=2 * len(modules),
        total=len(files.tensors),
        created=int(time.time()),
    )


def pair_tensors(tensors: Mapping[str, Tensor], sites: SiteMap) -> dict[str, LoraPair]:
    """Group tensors by module.

    Raises:
        AdapterUnsupported: a tensor is no half of a LoRA pair, or sits on a module that is not a linear layer.
        AdapterIncompatible: names that no module of the base answers to.
        AdapterCorrupt: a pair lacks a half, or a half is there twice.
    """
    halves: dict[str, dict[Role, Tensor]] = defaultdict(dict)
    homeless = []
    for name in sorted(tensors):
        parsed = parse_tensor_name(name, sites.module_paths)
        if parsed is None:
            homeless.append(name)
        elif parsed.module not in sites.linears:
            raise AdapterUnsupported(f"tensor {name} sits on {parsed.module}, which is not a linear layer")
        elif parsed.role in halves[parsed.module]:
            raise AdapterCorrupt(f"two tensors are {parsed.role} of {parsed.module}", got=name)
        else:
            halves[parsed.module][parsed.role] = tensors[name]
    if homeless:
        raise AdapterIncompatible(
            f"{len(homeless)} of {len(tensors)} tensors name no module of this base: {', '.join(homeless[:5])}",
            do="load it over the base it was trained on",
        )
    single = sorted(module for module, roles in halves.items() if len(roles) == 1)
    if single:
        present = next(iter(halves[single[0]]))
        lacking = "lora_B" if present == "lora_A" else "lora_A"
        raise AdapterCorrupt(f"{lacking} of {single[0]} is missing", got=f"{len(single)} incomplete pairs")
    if not halves:
        raise AdapterCorrupt("the adapter's weights file holds no tensors")
    return {module: LoraPair(lora_a=roles["lora_A"], lora_b=roles["lora_B"]) for module, roles in halves.items()}


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in ADAPTER_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ADAPTER_DTYPES)
            raise AdapterUnsupported(f"tensor {name} has an unsupported dtype", got=str(tensor.dtype), allowed=allowed)
        if not torch.isfinite(tensor).all():
            raise AdapterCorrupt(f"tensor {name} holds NaN or infinity")


def _check_targets(config: LoraConfig, pairs: Mapping[str, LoraPair], selected: frozenset[str], sites: SiteMap) -> None:
    # PEFT ignores tensors of modules the config does not target; serving without them would be another adapter.
    untargeted = sorted(pairs.keys() - selected)
    if untargeted:
        raise AdapterIncompatible(
            f"the weights hold modules the config does not target: {', '.join(untargeted[:5])}",
            got=f"target_modules={config.target_modules!r}"[:200],
            allowed=f"targets among the modules of this base, such as {next(iter(sites.linears))}",
        )
