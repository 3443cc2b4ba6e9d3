"""MXFP4 experts as transformers dequantises them."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graftlm.errors import CheckpointError
from graftlm.quantization.methods import read_quantization_config
from tests.quantization.memory_tensors import MemoryTensors

EXPERTS, ROWS, GROUPS = 3, 20, 4
STACK = "model.layers.0.mlp.experts.down_proj"
CPU = torch.device("cpu")


def stored() -> MemoryTensors:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, ROWS, GROUPS, 16), dtype=torch.uint8, generator=generator)
    # Every exponent whose values float32 and bfloat16 hold without rounding.
    scales = torch.arange(2, 2 + EXPERTS * ROWS * GROUPS, dtype=torch.uint8).view(EXPERTS, ROWS, GROUPS)
    return MemoryTensors({f"{STACK}_blocks": blocks, f"{STACK}_scales": scales})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_experts_values_are_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = stored()
    expected = convert_moe_packed_tensors(*tensors.tensors.values(), dtype=dtype).transpose(1, 2)
    weight_format = read_quantization_config({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    for expert in range(EXPERTS):
        path = f"{STACK}.{expert}"
        assert weight_format.stores(tensors, path)
        assert weight_format.tensor_names(tensors, path) == tensors.tensor_names()
        weight = weight_format.read(tensors, path, shape=(ROWS, GROUPS * 32), dtype=dtype, device=CPU)
        assert torch.equal(weight.dequantize(), expected[expert])
        assert torch.equal(weight.part(3, 7).dequantize(), expected[expert][3:7])
        assert torch.equal(weight.rows(torch.tensor([5, 0, 5])), expected[expert][[5, 0, 5]])


def test_the_experts_of_a_layer_share_the_memory_of_one_copy() -> None:
    tensors = stored()
    weight_format = read_quantization_config({"quant_method": "mxfp4"})
    weights = [
        weight_format.read(tensors, f"{STACK}.{expert}", shape=(ROWS, GROUPS * 32), dtype=torch.float32, device=CPU)
        for expert in range(EXPERTS)
    ]
    assert sum(weight.num_bytes for weight in weights) == EXPERTS * (ROWS * GROUPS * 17 + 4)


def test_modules_that_are_no_experts_are_stored_otherwise() -> None:
    weight_format = read_quantization_config({"quant_method": "mxfp4"})
    assert not weight_format.stores(stored(), "model.layers.0.self_attn.q_proj")
    assert not weight_format.stores(stored(), STACK)


@pytest.mark.parametrize(("expert", "columns"), [(EXPERTS, GROUPS * 32), (0, GROUPS * 32 - 1)])
def test_an_expert_that_is_not_there_or_has_no_whole_groups_is_refused(expert: int, columns: int) -> None:
    weight_format = read_quantization_config({"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match="cannot hold this expert's matrix"):
        weight_format.read(stored(), f"{STACK}.{expert}", shape=(ROWS, columns), dtype=torch.float32, device=CPU)
