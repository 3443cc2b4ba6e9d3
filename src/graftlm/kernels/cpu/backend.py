"""The C++ functions as an implementation of the operations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graftlm.kernels.cpu.attention import AttentionKernels
from graftlm.kernels.cpu.calls import DTYPE_CODES, takes
from graftlm.kernels.cpu.coded_matrix import CodedMatrix, takes_codes
from graftlm.kernels.cpu.elementwise import ElementwiseKernels
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.cpu.lora import LoraKernels
from graftlm.kernels.cpu.packed_matrix import PackedMatrix
from graftlm.kernels.cpu.recorder import CallRecorder
from graftlm.kernels.cpu.sampling import SamplingKernels
from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.kernels.kernel_set import Kernels


def cpu_kernels(library: Library, rest: Kernels, *, deterministic: bool = False) -> Kernels:
    """Most functions give a row the same bits in any batch; attention, LoRA and products with codes do on request, at a
    price for prompts.

    rest: does what the library has no function for, or does not take.
    """
    elementwise = ElementwiseKernels(library, rest)
    lora = LoraKernels(library, rest, by_row=deterministic)
    sampling = SamplingKernels(library, rest)
    attention = AttentionKernels(library, rest, by_position=deterministic)

    def pack(matrix: Tensor) -> PackedMatrix | None:
        return PackedMatrix(library, matrix) if takes(matrix) and matrix.is_contiguous() else None

    def pack_codes(codes: GroupedCodes, dtype: torch.dtype) -> CodedMatrix | None:
        if dtype not in DTYPE_CODES or not takes_codes(codes):
            return None
        return CodedMatrix(library, codes, dtype, by_row=deterministic)

    return replace(
        rest,
        name=f"C++ ({library.level}), {rest.name}",
        plan_lora=lora.plan_lora,
        lora=lora.lora,
        add=elementwise.add,
        join_columns=elementwise.join_columns,
        rms_norm=elementwise.rms_norm,
        layer_norm=elementwise.layer_norm,
        add_rms_norm=elementwise.add_rms_norm,
        add_layer_norm=elementwise.add_layer_norm,
        activate=elementwise.activate,
        gated_activation=elementwise.gated_activation,
        apply_rotary=elementwise.apply_rotary,
        write_kv=attention.write_kv,
        rotate_and_write=attention.rotate_and_write,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        draw_tokens=sampling.draw_tokens,
        token_logprobs=sampling.token_logprobs,
        pack=pack,
        pack_codes=pack_codes,
        new_recorder=lambda: CallRecorder(library),
    )
