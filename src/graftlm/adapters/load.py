"""From an adapter folder to an `Adapter`: strict, complete, or an error that names what is wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.adapters.adapter import Adapter
from graftlm.adapters.files import read_adapter_files
from graftlm.adapters.methods import METHODS
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.errors import AdapterCorrupt, AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

logger = logging.getLogger(__name__)

ADAPTER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_adapter(
    name: str, source: str | Path, base: BaseWeights, *, max_bytes: int, allow_pickle: bool = False
) -> Adapter:
    """Read an adapter, check all of it against a base, and compile it.

    Every config field is read or refused and every tensor is used; an adapter of which any part would be left out is
    refused rather than served as something else.

    Args:
        source: folder, weights file or hub id.
        max_bytes: larger weight files are refused unread.

    Raises:
        AdapterError: a subclass that says which file, field or tensor is at fault.
    """
    files = read_adapter_files(source, max_bytes=max_bytes, allow_pickle=allow_pickle)
    peft_type = files.config.get("peft_type")
    if peft_type not in METHODS:
        raise AdapterUnsupported(
            "this peft_type is not supported", got=repr(peft_type)[:200], allowed=", ".join(sorted(METHODS))
        )
    _check_values(files.tensors)
    tensors = ModuleTensors(files.tensors, base.sites.module_paths)
    with torch.inference_mode():
        compiled = METHODS[peft_type](files.config, tensors, base)
        tensors.check_all_taken()
        patch = compiled.builder.build()
        dormant = patch if compiled.dormant is None else compiled.dormant.build()
    modules = compiled.builder.modules
    if not modules:
        raise AdapterCorrupt("the adapter changes nothing in this base")
    logger.info("adapter %s: bound %d of %d tensors", name, tensors.total, tensors.total)
    if files.text_files:
        logger.warning("adapter %s: %s not used; the base's tokenizer serves it", name, ", ".join(files.text_files))
    return Adapter(
        name=name,
        digest=files.digest,
        method=compiled.method,
        modules=modules,
        patch=patch,
        dormant_patch=dormant,
        bound=tensors.total,
        total=tensors.total,
        created=int(time.time()),
        invocation_token_ids=compiled.invocation_token_ids,
        vocab_size=compiled.vocab_size,
    )


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in ADAPTER_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ADAPTER_DTYPES)
            raise AdapterUnsupported(f"tensor {name} has an unsupported dtype", got=str(tensor.dtype), allowed=allowed)
        if not torch.isfinite(tensor).all():
            raise AdapterCorrupt(f"tensor {name} holds NaN or infinity")
