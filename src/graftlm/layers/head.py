"""The output head: logits over the base's vocabulary, or an adapter's own."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.linear import apply_patches
from graftlm.layers.segments import Segments
from graftlm.quantization import Weight


class OutputHead:
    """Logits of hidden states. The weight may be the embedding's (a tied head); adapters on it touch the head alone.

    softcap: c * tanh(logit / c), after everything an adapter does.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None, softcap: float | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._softcap = softcap

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """hidden: [N, E] -> [N, V'] of its dtype, where V' is the largest vocabulary among the rows; a row's logits
        beyond its own vocabulary are -inf."""
        patched = [(segment, patch) for segment in segments if (patch := segment.patch.head) is not None]
        logits = self.weight.matmul(hidden, self.bias)
        resized = [patch.vocab_size for _, patch in patched if patch.vocab_size is not None]
        if resized:
            logits = _widen(logits, max(resized))
        apply_patches(logits, hidden, ((segment.start, segment.stop, patch.linear) for segment, patch in patched))
        for segment, patch in patched:
            span = slice(segment.start, segment.stop)
            if patch.vocab_size is not None:
                logits[span, patch.vocab_size :] = -torch.inf
            if patch.rows is not None:
                logits[span, patch.rows.ids] = ops.linear(hidden[span], patch.rows.values)
        return logits if self._softcap is None else _capped(logits, self._softcap)


def _widen(logits: Tensor, width: int) -> Tensor:
    if width <= logits.shape[1]:
        return logits
    wider = logits.new_full((logits.shape[0], width), -torch.inf)
    wider[:, : logits.shape[1]] = logits
    return wider


def _capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits beyond a vocabulary stay -inf."""
    return torch.where(torch.isneginf(logits), logits, ops.elementwise(torch.tanh, logits / softcap) * softcap)
