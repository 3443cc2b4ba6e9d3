"""How GPTQ checkpoints lay out a matrix of integers.

For a module of shape [N, K] with b bits and G groups:
qweight int32 [K * b / 32, N], codes of a column packed along K, lowest bits first;
qzeros int32 [G, N * b / 32], zero points packed along N the same way, one less than they mean in version 1;
scales float16 [G, N]; g_idx int32 [K], the group of each input, which may be absent.

Source: AutoGPTQ 0.7, nn_modules/qlinear/qlinear_cuda_old.py."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.packed_codes import PackedCodes

ROLES = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
# Other libraries need both sizes in whole words of any number of bits.
MULTIPLE = 32


def gptq_tensors(codes: PackedCodes, *, scale: Tensor, zero: Tensor, columns: ColumnGroups) -> dict[str, Tensor]:
    """The tensors of version 1, by role. codes: [N, K]. scale, zero: [N, G].

    Raises:
        CheckpointError: the layout has no place for the shape or the number of bits.
    """
    rows, num_groups = scale.shape
    if rows % MULTIPLE or codes.columns % MULTIPLE or codes.bits not in BITS:
        raise CheckpointError(
            "this matrix cannot be stored as GPTQ",
            got=f"{[rows, codes.columns]}, {codes.bits} bits",
            allowed=f"multiples of {MULTIPLE}, and {', '.join(map(str, BITS))} bits",
        )
    groups = torch.arange(num_groups, dtype=torch.int32, device=scale.device)
    stored_zero = (zero.T - 1) & ((1 << codes.bits) - 1)
    return {
        "qweight": codes.words().T.contiguous(),
        "qzeros": PackedCodes.pack(stored_zero, codes.bits).words(),
        "scales": scale.T.contiguous(),
        "g_idx": columns.spread(groups[None])[0].contiguous(),
    }
