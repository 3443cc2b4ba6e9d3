"""From an adapter folder to a `LoadedAdapter`: strict, complete, or an error that names what is wrong."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.adapters.adapter import Adapter, AdapterWeights, LoadedAdapter
from graftlm.adapters.files import AdapterFiles, read_adapter_files
from graftlm.adapters.layer_replication import FIELD, replicated_layers
from graftlm.adapters.methods import find_method
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.text import AdapterText, AdapterTexts
from graftlm.adapters.weighted import is_low_rank
from graftlm.errors import AdapterChanged, AdapterCorrupt, AdapterUnsupported
from graftlm.models.base_weights import BaseWeights
from graftlm.models.replicated import ReplicatedWeights

logger = logging.getLogger(__name__)

ADAPTER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of tensors that say which (VB-LoRA's vectors, SHiRA's elements).
INDEX_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
INDEX_SUFFIX = "_indices"


def load_adapter(
    name: str,
    source: str | Path,
    base: BaseWeights,
    *,
    max_bytes: int,
    allow_pickle: bool = False,
    round_factors: bool = False,
    texts: AdapterTexts | None = None,
) -> LoadedAdapter:
    """Read an adapter, check all of it against a base, and compile it.

    Every config field is read or refused and every tensor is used; an adapter of which any part would be left out is
    refused rather than served as something else.

    Args:
        source: folder, weights file or hub id.
        max_bytes: larger weight files are refused unread.
        round_factors: low-rank factors to bfloat16.
        texts: reads the adapter's own tokenizer; without it the base's serves.

    Raises:
        AdapterError: a subclass that says which file, field or tensor is at fault.
    """
    files = read_adapter_files(source, max_bytes=max_bytes, allow_pickle=allow_pickle)
    compiled, weights, tensors = _compile(files, base, round_factors=round_factors)
    modules = compiled.builder.modules
    if not modules:
        raise AdapterCorrupt("the adapter changes nothing in this base")
    bound = tensors.total - tensors.unused
    logger.info("adapter %s: bound %d of %d tensors", name, bound, tensors.total)
    rows = None if weights.patch.embedding is None else weights.patch.embedding.rows
    stack = weights.patch.stack
    has_own_tokens = compiled.vocab_size is not None or bool(compiled.virtual_token_ids)
    adapter = Adapter(
        name=name,
        digest=files.digest,
        method=compiled.method,
        modules=modules,
        source=files.weights_path,
        num_bytes=weights.num_bytes,
        float32_bytes=weights.float32_bytes,
        changes_dormant=weights.dormant_patch.num_bytes > 0 or stack is not None,
        is_low_rank=is_low_rank(weights) and not has_own_tokens,
        bound=bound,
        total=tensors.total,
        created=int(time.time()),
        invocation_token_ids=compiled.invocation_token_ids,
        vocab_size=compiled.vocab_size,
        own_token_ids=() if rows is None else tuple(rows.ids.tolist()),
        virtual_token_ids=compiled.virtual_token_ids,
        cache_factor=1 if stack is None else -(-len(stack.layers) // len(base.sites.layer_paths)),
        replicates_layers=stack is not None,
        most_repeats=1 if stack is None else max(Counter(stack.layers).values()),
        text=AdapterText() if texts is None else texts.read(files.weights_path.parent),
    )
    return LoadedAdapter(adapter=adapter, weights=weights)


def read_weights(
    source: Path,
    digest: str,
    base: BaseWeights,
    *,
    max_bytes: int,
    allow_pickle: bool = False,
    round_factors: bool = False,
) -> AdapterWeights:
    """Read the weights of an adapter that is known already.

    Args:
        source: its weights file. digest: what it had when it was loaded.
        max_bytes: larger weight files are refused unread.
        round_factors: low-rank factors to bfloat16.

    Raises:
        AdapterError: a subclass that says what has become of its files; `AdapterChanged` if they are another's now.
    """
    files = read_adapter_files(source, max_bytes=max_bytes, allow_pickle=allow_pickle)
    if files.digest != digest:
        raise AdapterChanged(
            "its files have changed since it was loaded",
            got=f"digest {files.digest[:12]}",
            allowed=f"digest {digest[:12]}",
            do="load it again under its name",
        )
    return _compile(files, base, round_factors=round_factors)[1]


def _compile(
    files: AdapterFiles, base: BaseWeights, *, round_factors: bool
) -> tuple[CompiledAdapter, AdapterWeights, ModuleTensors]:
    """What the files do to the base, and the tensors it was made of."""
    method = find_method(files.config.get("peft_type"))
    _check_values(files.tensors)
    layers = replicated_layers(files.config, base.sites) if FIELD in method.fields.read else None
    replicated = None if layers is None else ReplicatedWeights(base, layers)
    base = replicated or base
    tensors = ModuleTensors(files.tensors, base.sites)
    with torch.inference_mode():
        compiled = method.compile(files.config, tensors, base)
        tensors.check_all_taken()
        patch = compiled.builder.build()
        _check_tokens(compiled, base)
        dormant = patch if compiled.dormant is None else compiled.dormant.build()
    if replicated is not None:
        is_one = dormant is patch
        patch = replicated.stacked(patch)
        dormant = patch if is_one else replicated.stacked(dormant)
    weights = AdapterWeights(patch=patch, dormant_patch=dormant)
    return compiled, weights.rounded() if round_factors else weights, tensors


def _check_tokens(compiled: CompiledAdapter, base: BaseWeights) -> None:
    if base.sites.has_token_inputs and (compiled.virtual_token_ids or compiled.vocab_size is not None):
        raise AdapterUnsupported(
            "the adapter brings tokens of its own, but each layer of this base has inputs for the vocabulary's alone",
            do="train it without virtual or added tokens",
        )


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        if name.endswith(INDEX_SUFFIX) and tensor.dtype in INDEX_DTYPES:
            continue
        if tensor.dtype not in ADAPTER_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ADAPTER_DTYPES)
            raise AdapterUnsupported(f"tensor {name} has an unsupported dtype", got=str(tensor.dtype), allowed=allowed)
        if not torch.isfinite(tensor).all():
            raise AdapterCorrupt(f"tensor {name} holds NaN or infinity")
