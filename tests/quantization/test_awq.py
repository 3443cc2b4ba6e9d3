"""AWQ checkpoints mean what their description says, or are refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from graftlm.errors import CheckpointError
from graftlm.quantization.awq import AWQFormat
from tests.quantization.integer_packer import random_integers
from tests.quantization.memory_tensors import MemoryTensors

PATH = "model.layers.0.self_attn.q_proj"
CPU = torch.device("cpu")
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [16, 64, -1])
def test_the_gemm_layout_gives_the_packed_matrix(group_size: int, dtype: torch.dtype) -> None:
    packed = random_integers(group_size=group_size)
    reader = AWQFormat({**CONFIG, "group_size": group_size})
    weight = reader.read(MemoryTensors(packed.awq(PATH)), PATH, shape=packed.shape, dtype=dtype, device=CPU)
    assert torch.equal(weight.dequantize(), packed.expected().to(dtype))
    ids = torch.tensor([9, 30, 9])
    assert torch.equal(weight.rows(ids), packed.expected()[ids].to(dtype))
    assert torch.equal(weight.part(3, 9).dequantize(), packed.expected()[3:9].to(dtype))


def test_the_older_spelling_of_the_config_is_read() -> None:
    packed = random_integers(inputs=96, group_size=64)
    reader = AWQFormat({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"})
    weight = reader.read(MemoryTensors(packed.awq(PATH)), PATH, shape=packed.shape, dtype=torch.float32, device=CPU)
    assert torch.equal(weight.dequantize(), packed.expected())
    assert weight.format == "int4, groups of 64"


def test_the_tensors_win_over_the_config(caplog: pytest.LogCaptureFixture) -> None:
    packed = random_integers(group_size=32)
    with caplog.at_level(logging.WARNING):
        weight = AWQFormat({**CONFIG, "group_size": 16}).read(
            MemoryTensors(packed.awq(PATH)), PATH, shape=packed.shape, dtype=torch.float32, device=CPU
        )
    assert torch.equal(weight.dequantize(), packed.expected())
    assert len(caplog.records) == 1


def test_modules_are_quantised_where_their_tensors_are() -> None:
    packed = random_integers()
    tensors = MemoryTensors({**packed.awq(PATH), "lm_head.weight": torch.zeros(2, 2)})
    reader = AWQFormat({**CONFIG, "modules_to_not_convert": ["q_proj"]})
    assert reader.stores(tensors, PATH)
    assert not reader.stores(tensors, "lm_head")
    assert reader.tensor_names(tensors, PATH) == set(packed.awq(PATH))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"version": "gemv"}, "version.*gemv"),
        ({"version": "gemv_fast"}, "version.*gemv_fast"),
        ({"version": "marlin"}, "version.*marlin"),
        ({"version": "exllama"}, "version.*exllama"),
        ({"version": "llm-awq"}, "version.*llm-awq"),
        ({"bits": 3}, "bits"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_other_layouts_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        AWQFormat({**CONFIG, **config})


@pytest.mark.parametrize("change", ["missing", "shorter", "narrower", "empty", "scalar", "floats"])
@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales"])
def test_a_damaged_tensor_is_named(role: str, change: str) -> None:
    packed = random_integers(group_size=24, inputs=96)
    tensors = packed.awq(PATH)
    whole = tensors.pop(f"{PATH}.{role}")
    if change != "missing":
        tensors[f"{PATH}.{role}"] = {
            "shorter": whole[:-1],
            "narrower": whole[:, :-1],
            "empty": whole[:0],
            "scalar": whole[0, 0],
            "floats": whole.double(),
        }[change]
    reader = AWQFormat({**CONFIG, "group_size": 24})
    with pytest.raises(CheckpointError, match=rf"q_proj\.({role}{'|qzeros' if role == 'scales' else ''}) "):
        reader.read(MemoryTensors(tensors), PATH, shape=packed.shape, dtype=torch.float32, device=CPU)
