"""Matrices that were quantised while they were loaded, kept on disk for the next start.

An entry is a safetensors file with the tensors its format stores in checkpoints. Its name is a key, and the SHA-256 of
its bytes. The key is a digest of all that decides the values: the bytes of the checkpoint's weight files, its config,
what is quantised to what, the compute dtype, the kind of device, and the versions of torch
and of what is done with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.checkpoint.atomic_file import PARTIAL_SUFFIX, partial_file, publish
from graftlm.checkpoint.file_digests import FileDigests, file_digest
from graftlm.checkpoint.file_identity import FileIdentity
from graftlm.checkpoint.mapped_tensors import MappedTensors
from graftlm.checkpoint.safetensors_writer import PendingTensor, write_safetensors
from graftlm.errors import CheckpointError
from graftlm.models.layer_span import LayerSpan
from graftlm.quantization import Weight
from graftlm.quantization.format import StorableWeight, WeightFormat
from graftlm.quantization.methods import read_quantization_config
from graftlm.quantization.policy import LoadPolicy
from graftlm.quantization.written import WRITTEN_FORMATS

logger = logging.getLogger(__name__)

# Goes up when the same input is to give other values, or values under other names.
REVISION = 1
MAX_BYTES = 64 << 30
# A writer that still lives has touched its file since.
ABANDONED_SECONDS = 24 * 3600.0
SUFFIX = ".safetensors"


def default_cache_folder() -> Path:
    """`$GRAFT_CACHE`, or `~/.cache/graft`.

    Raises:
        RuntimeError: neither is there: the user has no home.
    """
    chosen = os.environ.get("GRAFT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "graft"


class QuantizedCache:
    """The matrices of one checkpoint, quantised in one way.

    `read` what is there, `add` what is not, `save` when all is done. No failure is an error: an entry that cannot be
    read is removed and written anew, one that cannot be written is not, and a log line says why. Any number of
    processes may use one folder.

    Args:
        folder: holds the entries; need not exist.
        key: see the module.
        weight_format: reads what is added.
        sources: the files that the key stands for. If one has changed by the time of `save`, nothing is written.
        max_bytes: of all entries; the least recently used go first, the newest never.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        weight_format: WeightFormat,
        *,
        sources: Mapping[Path, FileIdentity],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._key = key
        self._format = weight_format
        self._sources = sources
        self._max_bytes = max_bytes
        self._added: dict[str, StorableWeight] = {}
        self._num_read = 0
        self._entry = self._open()

    def read(self, path: str, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> Weight | None:
        """The matrix [out, in] of the module `path`; None where it has to be quantised. On the CPU it is a view of the
        entry's file. dtype: the compute dtype."""
        if self._entry is None:
            return None
        entry, tensors = self._entry
        try:
            weight = self._format.read(tensors, path, shape=shape, dtype=dtype, device=device)
        except CheckpointError as cause:
            self._entry = None
            _remove_unusable(entry, cause)
            return None
        self._num_read += 1
        return weight

    def add(self, path: str, weight: StorableWeight) -> None:
        """Keep what `read` had not. It is written by `save`, and must not change until then."""
        self._added[path] = weight

    def save(self) -> None:
        """Write what was added and make room for it. An entry of which some was read is whole, or was removed: then the
        next start begins a new one."""
        added, self._added = self._added, {}
        if not added or self._num_read:
            return
        tensors = [
            PendingTensor.of(f"{path}.{part}", tensor)
            for path, weight in added.items()
            for part, tensor in weight.stored_tensors().items()
        ]
        try:
            changed = [path for path, identity in self._sources.items() if FileIdentity.of(path) != identity]
            if changed:
                raise OSError(f"{changed[0]} has changed since it was opened")
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(sum(tensor.num_bytes for tensor in tensors))
            with partial_file(self._folder) as partial:
                write_safetensors(partial, tensors)
                publish(partial, self._folder / f"{self._key}-{file_digest(partial)}{SUFFIX}")
        except OSError as cause:
            logger.warning("the quantised weights are not kept for the next start: %s", cause)

    def _open(self) -> tuple[Path, MappedTensors] | None:
        """An entry under the key whose bytes are those that were written."""
        for entry in sorted(self._folder.glob(f"{self._key}-*{SUFFIX}")):
            try:
                if file_digest(entry) != entry.stem.removeprefix(f"{self._key}-"):
                    raise CheckpointError("its bytes are not those that were written")
                tensors = MappedTensors(entry)
            except (OSError, CheckpointError) as cause:
                _remove_unusable(entry, cause)
            else:
                # For `_make_room`; in a folder that may only be read nobody makes room.
                with suppress(OSError):
                    os.utime(entry)
                return entry, tensors
        return None

    def _make_room(self, num_bytes: int) -> None:
        """Remove entries until `num_bytes` fit, and what writers that were killed have left."""
        for partial, status in _present(self._folder.glob(f"*{PARTIAL_SUFFIX}")):
            if time.time() - status.st_mtime > ABANDONED_SECONDS:
                partial.unlink(missing_ok=True)
        entries = list(_present(self._folder.glob(f"*{SUFFIX}")))
        excess = sum(status.st_size for _, status in entries) + num_bytes - self._max_bytes
        for entry, status in sorted(entries, key=lambda pair: pair[1].st_mtime_ns):
            if excess <= 0:
                return
            # Whoever has it mapped keeps it.
            entry.unlink(missing_ok=True)
            excess -= status.st_size


def open_quantized_cache(
    checkpoint: Checkpoint,
    policy: LoadPolicy,
    *,
    dtype: torch.dtype,
    device: torch.device,
    span: LayerSpan | None = None,
) -> QuantizedCache | None:
    """A checkpoint's cache in `default_cache_folder()`; None where nothing is quantised, or its files cannot be read.

    Reads the checkpoint's weight files once, and again when they have changed: see `FileDigests`.

    Args:
        policy: what is quantised, and to what.
        dtype: the compute dtype, to which matrices are rounded before they are quantised.
        span: whose matrices it is to have, if not all: an entry is whole or is not used.
    """
    if policy.quantization is None:
        return None
    try:
        folder = default_cache_folder()
        digests = FileDigests(folder / "digests")
        files = [digests.digest(path, identity) for path, identity in checkpoint.weight_files.items()]
    except (OSError, RuntimeError) as cause:
        logger.warning("quantised weights are neither looked up nor kept: %s", cause)
        return None
    decides = {
        "revision": REVISION,
        "torch": torch.__version__,
        "files": files,
        "config": checkpoint.config,
        "stored": checkpoint.quantization_config,
        "policy": dataclasses.asdict(policy),
        "dtype": str(dtype),
        "device": device.type,
    }
    if span is not None and not (span.is_first and span.is_last):
        decides["layers"] = [span.start, span.stop]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:32]
    config = WRITTEN_FORMATS[policy.quantization].config([], str(dtype).removeprefix("torch."))
    return QuantizedCache(folder, key, read_quantization_config(config), sources=checkpoint.weight_files)


def _present(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Those that other processes have not removed meanwhile."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _remove_unusable(entry: Path, cause: Exception) -> None:
    logger.warning("%s in the cache is quantised anew: %s", entry.name, cause)
    with suppress(OSError):
        entry.unlink(missing_ok=True)
