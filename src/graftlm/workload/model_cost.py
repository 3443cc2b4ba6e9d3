"""What a step must read and multiply at the least: the yardstick that its time is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graftlm.layers.kv_cache import kv_bytes_per_token
from graftlm.models.decoder import Decoder
from graftlm.workload.run import Step


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Of a decoder whose matrices are all used by every step: no mixture of experts.

    weight_bytes: of all matrices as they are stored, the head included. num_layer_weights, num_head_weights: elements
        of the layers' matrices, which each row is multiplied with, and of the head, for rows that get a token.
    kv_bytes: of each cache group, keys and values of one token. windows: how far back each group sees.
    """

    weight_bytes: int
    num_layer_weights: int
    num_head_weights: int
    kv_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, decoder: Decoder) -> ModelCost | None:
        """None for a mixture of experts: what it reads depends on what its routers choose."""
        if decoder.sites.expert_modules or decoder.sites.expert_stacks:
            return None
        weights = [linear.weight for linear in decoder.linears.values()]
        head = decoder.head.weight
        return cls(
            weight_bytes=sum(weight.num_bytes for weight in weights) + head.num_bytes,
            num_layer_weights=sum(weight.shape[0] * weight.shape[1] for weight in weights),
            num_head_weights=head.shape[0] * head.shape[1],
            kv_bytes=tuple(
                kv_bytes_per_token([shape for shape in decoder.kv_shapes if shape.group == group], decoder.dtype)
                for group in range(len(decoder.windows))
            ),
            windows=decoder.windows,
        )

    def step_bytes(self, step: Step, *, adapter_bytes: int) -> int:
        """Bytes that a step reads at the least: every matrix and adapter once, and what each sequence attends to."""
        attended = sum(
            size * min(context, context if window is None else window)
            for size, window in zip(self.kv_bytes, self.windows, strict=True)
            for context in step.contexts
        )
        return self.weight_bytes + adapter_bytes + attended

    def step_flops(self, steps: Sequence[Step], *, adapter_weights: int) -> int:
        """Floating-point operations of the matrices in some steps; attention comes on top.

        Args:
            adapter_weights: elements that an adapter adds for each row.
        """
        rows = sum(step.prompt_rows + step.decode_rows for step in steps)
        tokens = sum(len(step.contexts) for step in steps)
        return 2 * (rows * (self.num_layer_weights + adapter_weights) + tokens * self.num_head_weights)
