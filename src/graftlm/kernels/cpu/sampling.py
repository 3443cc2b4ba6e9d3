"""Choosing tokens, and their log-probabilities, in C++."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graftlm.kernels.cpu.calls import DTYPE_CODES, takes
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.reference.sampling import TokenDraw, TokenLogprobs

# csrc's `Draw`.
_DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("answer", np.uint64),
        ("position", np.uint64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
    ]
)


class SamplingKernels:
    """The methods do what `ops` says under their names.

    rest: does what the library does not take.
    """

    def __init__(self, library: Library, rest: Kernels) -> None:
        self._library = library
        self._rest = rest

    def draw_tokens(self, logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
        if not takes(logits) or logits.stride(1) != 1:
            return self._rest.draw_tokens(logits, draws)
        rows, columns = logits.shape
        table = np.array(draws, dtype=_DRAW)
        tokens = np.empty(rows, dtype=np.int64)
        self._library.draw_tokens(
            tokens.ctypes.data,
            logits.data_ptr(),
            table.ctypes.data,
            DTYPE_CODES[logits.dtype],
            rows,
            columns,
            logits.stride(0),
            torch.get_num_threads(),
        )
        drawn: list[int] = tokens.tolist()
        return drawn

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, count: int) -> TokenLogprobs:
        if not takes(logits) or logits.stride(1) != 1:
            return self._rest.token_logprobs(logits, token_ids, count)
        rows, columns = logits.shape
        token_ids = token_ids.contiguous()
        rated = TokenLogprobs(
            logprobs=torch.empty(rows),
            ranks=torch.empty(rows, dtype=torch.int64),
            best_ids=torch.empty((rows, count), dtype=torch.int64),
            best_logprobs=torch.empty((rows, count)),
        )
        self._library.token_logprobs(
            *[tensor.data_ptr() for tensor in rated],
            logits.data_ptr(),
            token_ids.data_ptr(),
            DTYPE_CODES[logits.dtype],
            rows,
            columns,
            logits.stride(0),
            count,
            torch.get_num_threads(),
        )
        return rated
