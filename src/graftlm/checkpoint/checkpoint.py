"""What a model looks like on disk to the rest of Graft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from graftlm.checkpoint.file_identity import FileIdentity


class Checkpoint(Protocol):
    """A readable model.

    config: config.json's keys as transformers spells them.
    quantization_config: how matrices are stored, for the `FormatReader` that its "quant_method" names; None when all
        are plain numbers. A folder's is config.json's; a GGUF file's is "gguf" and the "block_types" by tensor name.
    generation_config: generation_config.json's keys; empty when the model has none.
    tokenizer_source: what `graftlm.text.load_tokenizer` reads: a folder, or a GGUF file's metadata.
    weight_files: what all tensors are read from, in an order that depends on nothing else; each file as it was before
        it was opened.
    dtype: name of the dtype the weights were saved in, such as "bfloat16".
    """

    config: Mapping[str, Any]
    quantization_config: Mapping[str, Any] | None
    generation_config: Mapping[str, Any]
    tokenizer_source: Path | Mapping[str, Any]
    weight_files: Mapping[Path, FileIdentity]
    dtype: str

    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors, as transformers writes them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU. It may be a view of a memory-mapped file: copy before writing."""
        ...

    def read_stored(self, name: str) -> Tensor:
        """A copy of the tensor as the file stores it, whatever its dtype: codes and blocks for a `WeightFormat`."""
        ...

    def close(self) -> None:
        """Release files. Tensors already read stay valid."""
        ...
