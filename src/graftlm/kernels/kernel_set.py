"""What an implementation of the operations consists of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.kernels.reference.activation import Activation
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.lora import AdapterRows, LoraSegment
from graftlm.kernels.reference.sampling import TokenDraw, TokenLogprobs

# How one step's sequences are attended: whatever an implementation makes for itself.
AttentionPlan = Any


class PackedMatrix(Protocol):
    """A matrix [out, in] in an order of an implementation's own."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_bytes(self) -> int: ...

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `ops.linear`."""
        ...

    def turned_linear(self, y: Tensor) -> Tensor:
        """y @ W, rounded once: the gradient that x has in `linear`. y: [T, out], in the matrix's dtype -> [T, in]."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """The matrix's rows. ids: int64 [T] -> [T, in]."""
        ...


class LoraPlan(Protocol):
    """How the adapters of one batch change each layer."""

    def segments(self, layer: str) -> Iterable[LoraSegment] | None:
        """For `lora` of the same implementation; None where no adapter changes the layer."""
        ...


class PlanMemory(Protocol):
    """Where a plan has what changes from step to step."""

    def take_over(self, other: Self) -> None:
        """Hold, at the same place, what the memory of another plan of the same layout holds. It must outlive this."""
        ...


@runtime_checkable
class RecordablePlan(Protocol):
    """A plan that others of the same layout can take the place of. layout: None if none can."""

    @property
    def layout(self) -> Hashable | None: ...

    @property
    def memory(self) -> PlanMemory: ...

    def held(self) -> Self:
        """The same with memory of its own, with room for all plans of the layout."""
        ...


@runtime_checkable
class RecordableLoraPlan(RecordablePlan, LoraPlan, Protocol): ...


class NotRecordable(Exception):
    """A computation is more than calls that can be made again; the message names what it did."""


class Recording(Protocol):
    """A computation that can be done again, and that has just been done."""

    @property
    def result(self) -> Tensor:
        """What was computed. Asked before another recording is made or played."""
        ...

    def play(self, inputs: Sequence[Tensor]) -> Tensor:
        """What is computed from other inputs of the same shapes, and from what plans hold now."""
        ...


class Recorder(Protocol):
    """Makes recordings of which one at a time is played."""

    def record(self, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], Tensor]) -> Recording:
        """Compute, and be able to do it again.

        Args:
            compute: is given copies of the inputs. It must decide nothing by the content of a tensor and ask nothing of
                other processes or threads, which goes unnoticed; its result is contiguous.

        Raises:
            NotRecordable: in the middle of it.
        """
        ...


class PlanAttention(Protocol):
    """`ops.plan_attention`."""

    def __call__(
        self,
        query_lens: Sequence[int],
        total_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        window: int | None = None,
        device: torch.device,
    ) -> AttentionPlan: ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of every operation that has more than one; each does what `ops` says under its name.

    A back-end that can do some cases only (by dtype, shape or device) is the reference with some functions replaced;
    these call the reference's for all other cases.

    name: for people.
    pack: lay out a matrix [out, in] for good, or None where it is best left as it is.
    pack_codes: the same for a matrix of codes, and the dtype of inputs and results; None where codes have no product.
    new_recorder: None where nothing can be recorded.
    """

    name: str
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grouped_matmul: Callable[[Tensor, Tensor], Tensor]
    elementwise: Callable[..., Tensor]
    plan_lora: Callable[[Sequence[AdapterRows], Sequence[str] | None], LoraPlan]
    lora: Callable[[Tensor, Tensor, Iterable[LoraSegment]], None]
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    join_columns: Callable[[Sequence[Tensor]], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]]
    activate: Callable[[Tensor, Activation], Tensor]
    gated_activation: Callable[[Tensor, Activation], Tensor]
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotate_and_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    plan_attention: PlanAttention
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionPlan, AttentionScores], Tensor]
    draw_tokens: Callable[[Tensor, Sequence[TokenDraw]], list[int]]
    token_logprobs: Callable[[Tensor, Tensor, int], TokenLogprobs]
    pack: Callable[[Tensor], PackedMatrix | None]
    pack_codes: Callable[[GroupedCodes, torch.dtype], PackedMatrix | None] | None
    new_recorder: Callable[[], Recorder] | None
