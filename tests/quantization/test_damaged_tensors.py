"""Whatever a tensor's shape and dtype, a format reads a whole matrix or refuses with a `CheckpointError`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.methods import read_quantization_config
from tests.quantization.memory_tensors import MemoryTensors

SIZES = [1, 8, 16, 33]
STRAY_SIZES = [0, 1, 2, 3, 4, 8, 16, 33]
DTYPES = [torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.float32, torch.float64]
FLOAT8_DTYPES = [torch.float8_e4m3fn, torch.float8_e8m0fnu]
PACKED = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}
CONFIGS = [
    {"quant_method": "gptq", "bits": 4, "group_size": 8},
    {"quant_method": "awq", "bits": 4, "group_size": 8},
    {"quant_method": "fp8", "weight_block_size": [8, 16]},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": PACKED}},
    {"quant_method": "compressed-tensors"},
]


@st.composite
def stray_tensors(draw: st.DrawFn, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> Tensor:
    """A tensor that mostly is as it should be: one of these shapes and dtypes, small numbers."""
    any_shape = st.lists(st.sampled_from(STRAY_SIZES), max_size=3).map(tuple)
    shape = draw(st.one_of(st.sampled_from(shapes), st.sampled_from(shapes), any_shape))
    dtype = draw(st.one_of(st.sampled_from(dtypes), st.sampled_from(dtypes), st.sampled_from(DTYPES + FLOAT8_DTYPES)))
    values = torch.randint(-3, 6, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    return values.to(torch.uint8).view(dtype) if dtype == torch.float8_e8m0fnu else values.to(dtype)


@st.composite
def modules(draw: st.DrawFn) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Some of all tensors that any format has, and the shape of the matrix."""
    rows, columns, groups = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES)), draw(st.sampled_from([1, 2]))
    row_words, column_words = -(-rows // 8), -(-columns // 8)
    scale_dtypes = [torch.float16, torch.float32, *FLOAT8_DTYPES]
    roles = {
        "qweight": stray_tensors([(column_words, rows), (columns, row_words)], [torch.int32]),
        "qzeros": stray_tensors([(groups, row_words)], [torch.int32]),
        "scales": stray_tensors([(groups, rows)], [torch.float16]),
        "g_idx": stray_tensors([(columns,)], [torch.int32]),
        "weight": stray_tensors([(rows, columns)], [torch.int8, torch.float8_e4m3fn]),
        "weight_packed": stray_tensors([(rows, column_words), (rows, columns // 2)], [torch.int32, torch.uint8]),
        "weight_scale": stray_tensors([(rows, groups), (rows, 1), (rows,), (1,), (row_words, groups)], scale_dtypes),
        "weight_zero_point": stray_tensors([(row_words, groups), (rows, groups)], [torch.int32, torch.int8]),
        "weight_g_idx": stray_tensors([(columns,)], [torch.int32]),
        "weight_global_scale": stray_tensors([(1,)], [torch.float32]),
    }
    present = {role: tensor for role, tensor in roles.items() if draw(st.integers(0, 5))}
    return {f"proj.{role}": draw(tensor) for role, tensor in present.items()}, (rows, columns)


@settings(max_examples=250, deadline=None)
@given(modules(), st.sampled_from(CONFIGS))
def test_a_matrix_is_read_whole_or_refused(module: tuple[dict[str, Tensor], tuple[int, int]], config: object) -> None:
    assert isinstance(config, dict)
    tensors, (rows, columns) = module
    reader = read_quantization_config(config)
    try:
        weight = reader.read(
            MemoryTensors(tensors), "proj", shape=(rows, columns), dtype=torch.float32, device=torch.device("cpu")
        )
    except CheckpointError:
        return
    assert weight.dequantize().shape == (rows, columns)
    assert weight.part(0, 1).dequantize().shape == (1, columns)
    assert weight.rows(torch.tensor([rows - 1])).shape == (1, columns)
