"""A base and an adapter made one model that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from graftlm.adapters.adapter import Adapter, LoadedAdapter
from graftlm.adapters.files import find_adapter
from graftlm.adapters.load import load_adapter
from graftlm.adapters.merged_weights import MergedWeights
from graftlm.adapters.text import TOKENIZER_FILES
from graftlm.adapters.weighted import choice_name, combine, combine_weights, is_weighted, parse_weighted
from graftlm.checkpoint import open_checkpoint
from graftlm.checkpoint.safetensors_writer import MAX_SHARD_BYTES
from graftlm.models.base_weights import BaseWeights, CheckpointWeights
from graftlm.models.export import accompanying_files, check_exportable, export_checkpoint

# Other forms of a tokenizer, which an adapter's own makes untrue.
_OTHER_TOKENIZER_FILES = ("merges.txt", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")


def merge(
    model: str | Path,
    adapter: str | Path | Mapping[str, float],
    folder: str | Path,
    *,
    allow_pickle: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Adapter:
    """Write the model that `model` is with `adapter`.

    Everything is computed in float32 and rounded once, to the dtype each tensor has in `model`. One tensor of the model
    is in memory at a time, besides the adapter. The head stays tied to the embedding only if both are still one matrix.
    A tokenizer, chat template or generation config in the adapter's folder takes the place of the base's.

    Args:
        model: model folder or hub id, in float32, bfloat16 or float16.
        adapter: folder, weights file or hub id; or several of them with weights, {path: weight} or "path:0.7+path:0.3".
        folder: does not exist yet, or is empty. It appears complete or not at all.
        allow_pickle: read `.bin` weights of adapters, with torch's restricted unpickler.
        max_shard_bytes: size of one weights file.

    Returns:
        The adapter that was merged; its `modules` say what was changed.

    Raises:
        AdapterUnsupported: no weights of this architecture do what the adapter does: activated LoRA, learned prompts,
            replicated layers, biases where the base has none.
        AdapterError: the adapter cannot be read, or does not fit.
        CheckpointError: the model cannot be read, or is quantised.
        ConfigurationError: `folder` is not empty.
    """
    folder = Path(folder).expanduser()
    checkpoint = open_checkpoint(model)
    try:
        check_exportable(checkpoint, folder)
        base = CheckpointWeights(checkpoint)
        files = accompanying_files(checkpoint)
        with torch.inference_mode():
            weights = _weights(adapter)
            if weights is None:
                loaded = _load(str(adapter), base, allow_pickle=allow_pickle)
                files = _with_own_text(files, str(adapter))
            else:
                parts = [(_load(source, base, allow_pickle=allow_pickle), weight) for source, weight in weights.items()]
                loaded = LoadedAdapter(
                    adapter=combine(choice_name(weights), [(part.adapter, weight) for part, weight in parts]),
                    weights=combine_weights([(part.weights, weight) for part, weight in parts]),
                )
            merged = MergedWeights(base, loaded)
            export_checkpoint(merged, checkpoint, folder, files=files, max_shard_bytes=max_shard_bytes)
    finally:
        checkpoint.close()
    return loaded.adapter


def _weights(adapter: str | Path | Mapping[str, float]) -> Mapping[str, float] | None:
    """Weights by path; None for one adapter as it is."""
    if isinstance(adapter, Mapping):
        choice_name(adapter)
        return adapter
    is_sum = isinstance(adapter, str) and is_weighted(adapter) and not Path(adapter).exists()
    return parse_weighted(str(adapter)) if is_sum else None


def _load(source: str, base: BaseWeights, *, allow_pickle: bool) -> LoadedAdapter:
    return load_adapter(Path(source).name, source, base, max_bytes=2**62, allow_pickle=allow_pickle)


def _with_own_text(files: Mapping[str, Path], adapter: str) -> dict[str, Path]:
    """The files beside a base's weights, or the adapter's in their place where it has some."""
    config, _ = find_adapter(adapter)
    names = (*TOKENIZER_FILES, "generation_config.json")
    own = {name: config.parent / name for name in names if (config.parent / name).is_file()}
    replaced = {*TOKENIZER_FILES, *_OTHER_TOKENIZER_FILES} if "tokenizer.json" in own else set()
    return {**{name: path for name, path in files.items() if name not in replaced}, **own}
