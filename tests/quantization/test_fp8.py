"""FP8 checkpoints are their floats times their scales, or are refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.fp8 import FP8Format
from graftlm.quantization.scaled_float8 import ScaledFloat8
from tests.quantization.memory_tensors import MemoryTensors

PATH = "model.layers.0.self_attn.qkv_proj"
CPU = torch.device("cpu")
SHAPE = (48, 80)
BLOCK = [32, 48]


def random_values(dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.1


def read(
    values: Tensor,
    scale: Tensor,
    *,
    role: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
    parts: tuple[int, ...] = (),
    shape: tuple[int, int] = SHAPE,
    **config: Any,
) -> ScaledFloat8:
    tensors = MemoryTensors({f"{PATH}.weight": values, f"{PATH}.{role}": scale})
    return FP8Format(config).read(tensors, PATH, shape=shape, dtype=dtype, device=CPU, parts=parts)


def check(weight: ScaledFloat8, expected: Tensor) -> None:
    assert weight.shape == SHAPE
    assert torch.equal(weight.dequantize(), expected)
    ids = torch.tensor([47, 0, 33, 33])
    assert torch.equal(weight.rows(ids), expected[ids])
    assert torch.equal(weight.part(20, 40).dequantize(), expected[20:40])
    assert torch.equal(weight.part(20, 40).part(10, 15).rows(torch.tensor([3])), expected[33:34])


@pytest.mark.parametrize("values_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_all(shape: tuple[int, ...], values_dtype: torch.dtype) -> None:
    values, scale = random_values(values_dtype), random_scales(*shape)
    check(read(values, scale), values.float() * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48,), (48, 1)])
def test_one_scale_per_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, scale = random_values(), random_scales(*shape)
    check(read(values, scale, dtype=dtype), (values.float() * scale.view(48, 1)).to(dtype))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_one_scale_per_block_the_last_of_which_are_cut(scale_dtype: torch.dtype) -> None:
    values, scale = random_values(), random_scales(2, 2).to(scale_dtype)
    whole = scale.float().repeat_interleave(32, 0)[:48].repeat_interleave(48, 1)[:, :80]
    weight = read(values, scale, role="weight_scale_inv", weight_block_size=BLOCK, activation_scheme="dynamic")
    check(weight, values.float() * whole)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_scales_that_are_exponents(as_bytes: bool) -> None:
    values = random_values()
    exponents = torch.tensor([[120, 127], [131, 0]], dtype=torch.uint8)
    scale = exponents if as_bytes else exponents.view(torch.float8_e8m0fnu)
    whole = torch.exp2(exponents.double() - 127).float().repeat_interleave(32, 0)[:48].repeat_interleave(48, 1)[:, :80]
    check(read(values, scale, role="weight_scale_inv", weight_block_size=BLOCK), values.float() * whole)


def test_one_scale_per_fused_part() -> None:
    values, scale = random_values(), random_scales(3)
    whole = torch.cat([scale[:1].expand(32), scale[1:2].expand(8), scale[2:].expand(8)])[:, None]
    check(read(values, scale, parts=(32, 8, 8)), values.float() * whole)


@pytest.mark.parametrize("parts", [(), (24, 24), (32, 8, 9)])
def test_scales_of_parts_that_are_not_the_models_are_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight_scale has the wrong shape"):
        read(random_values(), random_scales(3), parts=parts)


def test_the_tensors_win_over_the_config(caplog: pytest.LogCaptureFixture) -> None:
    values, scale = random_values(), random_scales(48, 1)
    with caplog.at_level(logging.WARNING):
        weight = read(values, scale, weight_block_size=BLOCK)
    check(weight, values.float() * scale)
    assert len(caplog.records) == 1


def test_activation_scales_are_known_and_said_to_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    layer = PATH.rpartition(".")[0]
    known = {f"{PATH}.weight", f"{PATH}.weight_scale", f"{PATH}.input_scale", f"{layer}.k_scale", f"{layer}.v_scale"}
    tensors = MemoryTensors(
        dict.fromkeys(known, torch.ones(1)) | {"lm_head.weight": torch.ones(2, 2), f"{PATH}.bias": torch.ones(2)}
    )
    with caplog.at_level(logging.INFO):
        reader = FP8Format({"activation_scheme": "static"})
    assert ["activation_scheme = static" in record.getMessage() for record in caplog.records] == [True]
    assert reader.tensor_names(tensors, PATH) == known
    assert reader.stores(tensors, PATH)
    assert not reader.stores(tensors, "lm_head")


def test_memory_is_a_byte_per_weight_and_its_scales() -> None:
    weight = read(random_values(), random_scales(1))
    assert weight.num_bytes == 48 * 80 + 4 + 4 * 48
    assert weight.format == "float8_e4m3fn, one scale"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [128, True]}, "weight_block_size"),
        ({"activation_scheme": "sometimes"}, "activation_scheme"),
    ],
)
def test_unknown_settings_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        FP8Format(config)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (0,), (48, 7), (2, 2, 1), (47,)])
def test_scales_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight_scale_inv has the wrong shape"):
        read(random_values(), random_scales(*shape), role="weight_scale_inv", weight_block_size=BLOCK)


def test_other_values_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has the wrong dtype; got: int8"):
        read(torch.zeros(SHAPE, dtype=torch.int8), random_scales(1))
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has the wrong shape"):
        read(random_values()[:-1], random_scales(1))
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight_scale has the wrong dtype; got: int64"):
        read(random_values(), torch.ones(1, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight_scale is missing"):
        FP8Format({}).read(
            MemoryTensors({f"{PATH}.weight": random_values()}), PATH, shape=SHAPE, dtype=torch.float32, device=CPU
        )
