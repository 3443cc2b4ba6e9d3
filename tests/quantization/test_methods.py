"""A quantization_config finds its reader by quant_method."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.errors import CheckpointError
from graftlm.quantization.methods import QUANTIZATION_METHODS, read_quantization_config
from tests.quantization.integer_packer import random_integers
from tests.quantization.memory_tensors import MemoryTensors


def test_the_method_picks_the_reader() -> None:
    packed = random_integers()
    for method, tensors in (("gptq", packed.gptq("proj")), ("awq", packed.awq("proj"))):
        reader = read_quantization_config({"quant_method": method, "bits": 4, "group_size": 16})
        weight = reader.read(
            MemoryTensors(tensors), "proj", shape=packed.shape, dtype=torch.float32, device=torch.device("cpu")
        )
        assert torch.equal(weight.dequantize(), packed.expected())


@pytest.mark.parametrize("config", [{}, {"quant_method": "quip"}, {"quant_method": 3}, {"quant_method": None}])
def test_an_unknown_method_is_refused_with_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quant_method") as error:
        read_quantization_config(config)
    assert all(method in str(error.value) for method in QUANTIZATION_METHODS)
