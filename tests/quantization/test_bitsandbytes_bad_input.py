"""Damaged bitsandbytes checkpoints are refused by the name of the tensor at fault."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes import EightBitWeight, FourBitWeight, bitsandbytes_format
from tests.quantization.bitsandbytes_oracle import CPU, PATH, four_bit, int8, random_matrix, set_state
from tests.quantization.memory_tensors import MemoryTensors

SHAPE = (16, 128)
STATE = f"{PATH}.weight.quant_state.bitsandbytes__nf4"


def read(tensors: dict[str, Tensor], shape: tuple[int, int] = SHAPE) -> FourBitWeight | EightBitWeight:
    reader = bitsandbytes_format({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    return reader.read(MemoryTensors(tensors), PATH, shape=shape, dtype=torch.float32, device=CPU)


def nf4_double() -> dict[str, Tensor]:
    return four_bit(random_matrix(*SHAPE), quant_type="nf4", compress_statistics=True)[0]


FOUR_BIT_NAMES = [
    f"{PATH}.{name}"
    for name in (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4",
    )
]
INT8_NAMES = [f"{PATH}.{name}" for name in ("weight", "SCB")]


@pytest.mark.parametrize("name", FOUR_BIT_NAMES)
def test_a_missing_four_bit_tensor_is_named(name: str) -> None:
    tensors = nf4_double()
    del tensors[name]
    with pytest.raises(CheckpointError, match=name):
        read(tensors)


@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "wider"])
@pytest.mark.parametrize("name", FOUR_BIT_NAMES)
def test_a_four_bit_tensor_of_another_size_is_named(name: str, change: str) -> None:
    tensors = nf4_double()
    tensor = tensors[name]
    tensors[name] = {
        "shorter": tensor[:-1],
        "longer": torch.cat([tensor, tensor[:1]]),
        "empty": tensor[:0],
        "wider": tensor.to(torch.complex64),
    }[change]
    with pytest.raises(CheckpointError, match=name):
        read(tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_type", "fp4"),
        ("quant_type", None),
        ("blocksize", 63),
        ("blocksize", 0),
        ("blocksize", -64),
        ("blocksize", 64.0),
        ("blocksize", "64"),
        ("blocksize", 128),
        ("blocksize", 10**40),
        ("dtype", "int8"),
        ("dtype", ["float32"]),
        ("shape", [128, 16]),
        ("shape", [16, 128, 1]),
        ("shape", "16"),
        ("shape", None),
        ("nested_blocksize", 0),
        ("nested_blocksize", None),
        ("nested_dtype", "float64"),
        ("nested_offset", float("nan")),
        ("nested_offset", 10**400),
        ("nested_offset", "1"),
        ("nested_offset", None),
    ],
)
def test_an_unusable_field_of_the_quant_state_is_refused(key: str, value: Any) -> None:
    tensors = nf4_double()
    set_state(tensors, **{key: value})
    # A block size that is valid but wrong shows in the number of scales.
    fault = f"{PATH}.weight.absmax" if value == 128 else f"{STATE} holds an unusable {key}"
    with pytest.raises(CheckpointError, match=fault):
        read(tensors)


def test_an_unknown_field_of_the_quant_state_is_refused() -> None:
    tensors = nf4_double()
    set_state(tensors, zero_point=8)
    with pytest.raises(CheckpointError, match=rf"{STATE} holds an unknown field.*zero_point"):
        read(tensors)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_quant_state_that_is_no_json_object_is_refused(text: bytes) -> None:
    tensors = nf4_double()
    tensors[STATE] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=STATE):
        read(tensors)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_flipped_byte_in_the_quant_state_is_harmless_or_refused(position: int, byte: int) -> None:
    tensors = nf4_double()
    text = tensors[STATE].clone()
    text[position % text.numel()] = byte
    tensors[STATE] = text
    with contextlib.suppress(CheckpointError):
        assert read(tensors).dequantize().shape == SHAPE


def test_two_quant_states_are_refused() -> None:
    tensors = nf4_double()
    tensors[f"{PATH}.weight.quant_state.bitsandbytes__fp4"] = tensors[STATE]
    with pytest.raises(CheckpointError, match=r"2 quant_state tensors.*bitsandbytes__fp4"):
        read(tensors)


def test_an_unknown_quant_type_is_refused() -> None:
    tensors = nf4_double()
    tensors[f"{PATH}.weight.quant_state.bitsandbytes__af4"] = tensors.pop(STATE)
    with pytest.raises(CheckpointError, match=r"does not say how.*bitsandbytes__nf4"):
        read(tensors)


def test_a_code_table_with_values_that_are_no_numbers_is_refused() -> None:
    tensors = nf4_double()
    tensors[f"{PATH}.weight.quant_map"] = tensors[f"{PATH}.weight.quant_map"].clone()
    tensors[f"{PATH}.weight.quant_map"][3] = float("inf")
    with pytest.raises(CheckpointError, match="quant_map"):
        read(tensors)


@pytest.mark.parametrize("name", INT8_NAMES)
@pytest.mark.parametrize("change", ["shorter", "longer", "one more dimension", "wider"])
def test_a_damaged_int8_tensor_is_named(name: str, change: str) -> None:
    tensors = int8(random_matrix(*SHAPE))
    tensor = tensors[name]
    tensors[name] = {
        "shorter": tensor[:-1],
        "longer": torch.cat([tensor, tensor[:1]]),
        "one more dimension": tensor.unsqueeze(-1),
        "wider": tensor.double(),
    }[change]
    with pytest.raises(CheckpointError, match=name):
        read(tensors)


def test_int8_scales_without_codes_are_refused() -> None:
    tensors = int8(random_matrix(*SHAPE))
    del tensors[f"{PATH}.weight"]
    with pytest.raises(CheckpointError, match=f"{PATH}.weight is missing"):
        read(tensors)


def test_int8_codes_without_scales_are_not_taken_for_quantised() -> None:
    tensors = int8(random_matrix(*SHAPE))
    del tensors[f"{PATH}.SCB"]
    assert not bitsandbytes_format({}).stores(MemoryTensors(tensors), PATH)


@pytest.mark.parametrize("layout", [1, 2, 3])
def test_int8_codes_tiled_for_old_gpus_are_refused(layout: int) -> None:
    tensors = int8(random_matrix(*SHAPE)) | {f"{PATH}.weight_format": torch.tensor(layout, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"{PATH}.weight_format.*got: {layout}"):
        read(tensors)


def test_a_module_with_tensors_of_both_widths_is_refused() -> None:
    tensors = nf4_double() | int8(random_matrix(*SHAPE))
    with pytest.raises(CheckpointError, match=rf"{PATH} do not say.*{PATH}\.SCB"):
        read(tensors)


def test_a_matrix_of_another_shape_than_the_model_asks_for_is_refused() -> None:
    with pytest.raises(CheckpointError, match=f"{STATE} holds an unusable shape"):
        read(nf4_double(), (32, 64))
