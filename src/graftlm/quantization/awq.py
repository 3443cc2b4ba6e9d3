"""AWQ checkpoints in AutoAWQ's "gemm" layout.

For a module of shape [N, K] with 4 bits and G groups:
qweight int32 [K, N / 8], eight outputs of one input in a word, in an order of their own;
qzeros int32 [G, N / 8], zero points packed the same way; scales float16 [G, N].
w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), g = k // group_size

Source: AutoAWQ 0.2, modules/linear/gemm.py and utils/packing_utils.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.quantization.activation_scales import activation_scale_names
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.grouped_integers import GroupedIntegers
from graftlm.quantization.integer_groups import consecutive_groups
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.settings import Settings
from graftlm.quantization.stored_module import StoredModule, present_names

ROLES = ("qweight", "qzeros", "scales")
BITS = 4
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODES_PER_WORD = 8
# Where in its word a column's code lies: the i-th lowest four bits hold column (0, 2, 4, 6, 1, 3, 5, 7)[i].
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQFormat:
    """A `WeightFormat`.

    config: quantization_config, or AutoAWQ's quant_config.json with its w_bit and q_group_size.

    Raises:
        CheckpointError: another number of bits, or a layout made for one kernel.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = Settings(config)
        settings.text(
            "version",
            "checkpoint_format",
            "format",
            allowed=["gemm"],
            why="use the checkpoint in the gemm layout; layouts made for one GPU kernel are not read",
        )
        settings.integer("bits", "w_bit", allowed=[BITS])
        self._group_size = settings.group_size("group_size", "q_group_size")
        self._disagreements = Disagreements()

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return bool(present_names(tensors, path, ["qweight"]))

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return present_names(tensors, path, ROLES) | activation_scale_names(tensors, path)

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> GroupedIntegers:
        module = StoredModule(tensors, path, device)
        rows, columns = shape
        num_words = -(-rows // CODES_PER_WORD)
        words = module.read("qweight", dtypes=[torch.int32], shapes=[(columns, num_words)])
        num_groups = module.shape("scales")[0] if module.shape("scales") else 0
        scales = module.read("scales", dtypes=SCALE_DTYPES, shapes=[(num_groups, rows)])
        zeros = module.read("qzeros", dtypes=[torch.int32], shapes=[(num_groups, num_words)])
        groups = consecutive_groups(
            module,
            "scales",
            columns=columns,
            num_groups=num_groups,
            group_size=self._group_size,
            disagreements=self._disagreements,
        )
        return GroupedIntegers(
            codes=PackedCodes.pack(_in_order(words, rows).T, BITS),
            scale=scales.T.contiguous(),
            zero=_in_order(zeros, rows).T.contiguous(),
            columns=groups,
            dtype=dtype,
        )


def _in_order(words: Tensor, count: int) -> Tensor:
    """The codes in words: int32 [R, ceil(count / 8)] -> uint8 [R, count]."""
    stored = PackedCodes.from_words(words, words.shape[1] * CODES_PER_WORD, BITS).unpack()
    return stored.view(*words.shape, CODES_PER_WORD)[..., PLACES].flatten(1)[:, :count]
