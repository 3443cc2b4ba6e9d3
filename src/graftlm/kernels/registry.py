"""Which implementation of each operation is used: a set of them that whoever computes enters around the forward pass.

Outside `using` it is the reference. The choice belongs to the calling thread, so that engines with different ones can
compute side by side in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from graftlm.kernels.cpu.backend import cpu_kernels
from graftlm.kernels.cpu.library import best_library
from graftlm.kernels.deterministic import activation as deterministic_activation
from graftlm.kernels.deterministic import attention as deterministic_attention
from graftlm.kernels.deterministic import elementwise as deterministic_elementwise
from graftlm.kernels.deterministic import linear as deterministic_linear
from graftlm.kernels.deterministic import lora as deterministic_lora
from graftlm.kernels.kernel_set import Kernels, PackedMatrix
from graftlm.kernels.reference.activation import activate, gated_activation
from graftlm.kernels.reference.attention import paged_attention, plan_attention
from graftlm.kernels.reference.elementwise import elementwise
from graftlm.kernels.reference.kv_write import rotate_and_write, write_kv
from graftlm.kernels.reference.linear import grouped_matmul, join_columns, linear
from graftlm.kernels.reference.lora import lora, plan_lora
from graftlm.kernels.reference.norm import add, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from graftlm.kernels.reference.rotary import apply_rotary
from graftlm.kernels.reference.sampling import draw_tokens, token_logprobs


def keep_unpacked(matrix: Tensor) -> PackedMatrix | None:
    """The reference has no order of its own."""
    return None


REFERENCE = Kernels(
    name="reference",
    linear=linear,
    grouped_matmul=grouped_matmul,
    elementwise=elementwise,
    plan_lora=plan_lora,
    lora=lora,
    rms_norm=rms_norm,
    add=add,
    join_columns=join_columns,
    layer_norm=layer_norm,
    add_rms_norm=add_rms_norm,
    add_layer_norm=add_layer_norm,
    activate=activate,
    gated_activation=gated_activation,
    apply_rotary=apply_rotary,
    write_kv=write_kv,
    rotate_and_write=rotate_and_write,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    draw_tokens=draw_tokens,
    token_logprobs=token_logprobs,
    pack=keep_unpacked,
    pack_codes=None,
    new_recorder=None,
)

DETERMINISTIC = replace(
    REFERENCE,
    name="deterministic",
    linear=deterministic_linear.linear,
    grouped_matmul=deterministic_linear.grouped_matmul,
    elementwise=deterministic_elementwise.elementwise,
    lora=deterministic_lora.lora,
    activate=deterministic_activation.activate,
    gated_activation=deterministic_activation.gated_activation,
    plan_attention=deterministic_attention.plan_attention,
    paged_attention=deterministic_attention.paged_attention,
)

_active: ContextVar[Kernels] = ContextVar("kernels", default=REFERENCE)

# The implementations that the calling thread uses now.
active = _active.get


def choose_kernels(device: torch.device, *, deterministic: bool) -> Kernels:
    """The fastest there are for a device, or those whose results have the same bits in any batch."""
    rest = DETERMINISTIC if deterministic else REFERENCE
    library = best_library().library if device.type == "cpu" else None
    return rest if library is None else cpu_kernels(library, rest, deterministic=deterministic)


def choose_training_kernels(device: torch.device) -> Kernels:
    """As `choose_kernels`, for matrices that gradients go back through: torch multiplies from both sides with those of
    floats as they are, so that only those of codes are laid out."""
    return replace(choose_kernels(device, deterministic=False), pack=keep_unpacked)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Operations called inside are these."""
    token = _active.set(kernels)
    try:
        yield
    finally:
        _active.reset(token)
