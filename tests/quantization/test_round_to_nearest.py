"""Rounding to the nearest step, and storing the result as GPTQ does."""

from __future__ import annotations

import pytest
import torch

from graftlm.errors import CheckpointError
from graftlm.quantization.format import Quantizer
from graftlm.quantization.gptq import GPTQFormat
from graftlm.quantization.methods import read_quantization_config
from graftlm.quantization.round_to_nearest import RoundToNearest
from tests.quantization.integer_packer import IntegerMatrix, random_integers
from tests.quantization.memory_tensors import MemoryTensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("group_size", [32, 48, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_value_is_further_off_than_half_a_step(bits: int, group_size: int) -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight = RoundToNearest(bits=bits, group_size=group_size).quantize(matrix, dtype=torch.float32)
    largest = torch.stack([part.abs().amax(1) for part in matrix.split(group_size, dim=1)], dim=1)
    step = (2 * largest / (2**bits - 1)).repeat_interleave(group_size, dim=1)[:, :96]
    # float16 scales are off by up to 2**-11.
    assert ((weight.dequantize() - matrix).abs() <= step / 2 + largest.max() * 2**-10).all()
    assert not torch.equal(weight.dequantize(), matrix)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_independent_unpacker_reads_what_is_stored(bits: int) -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    weight = RoundToNearest(bits=bits, group_size=32).quantize(matrix, dtype=torch.float32)
    tensors = weight.stored_tensors()
    assert tensors["qweight"].dtype == tensors["qzeros"].dtype == tensors["g_idx"].dtype == torch.int32
    assert tensors["scales"].dtype == torch.float16
    unpacked = IntegerMatrix(
        codes=unpack_lines(tensors["qweight"].T, 96, bits).T,
        zeros=(unpack_lines(tensors["qzeros"], 64, bits) + 1) % 2**bits,
        scales=tensors["scales"],
        groups=tensors["g_idx"].long(),
        bits=bits,
    )
    assert torch.equal(unpacked.expected(), weight.dequantize())


def unpack_lines(words: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Codes from each line's words, by way of one long integer."""
    lines = []
    for line in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(line))
        lines.append([number >> (bits * position) & (2**bits - 1) for position in range(count)])
    return torch.tensor(lines)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_gptq_checkpoint_is_stored_as_it_was_read(bits: int, shuffled: bool) -> None:
    packed = random_integers(bits=bits, shuffled=shuffled)
    tensors = packed.gptq("proj")
    weight = GPTQFormat({"bits": bits, "group_size": 16}).read(
        MemoryTensors(tensors), "proj", shape=packed.shape, dtype=torch.float32, device=CPU
    )
    stored = weight.stored_tensors()
    assert {f"proj.{role}" for role in stored} == set(tensors)
    for role, tensor in stored.items():
        assert torch.equal(tensor, tensors[f"proj.{role}"])


def test_its_config_describes_what_it_stores() -> None:
    quantizer = RoundToNearest(bits=8, group_size=48)
    storing: Quantizer = quantizer
    matrix = torch.randn(32, 96, generator=torch.Generator().manual_seed(2))
    weight = storing.quantize(matrix, dtype=torch.float32)
    tensors = MemoryTensors({f"proj.{role}": tensor for role, tensor in weight.stored_tensors().items()})
    reader = read_quantization_config(quantizer.quantization_config(skipped_modules=["lm_head"]))
    read = reader.read(tensors, "proj", shape=(32, 96), dtype=torch.float32, device=CPU)
    assert torch.equal(read.dequantize(), weight.dequantize())


@pytest.mark.parametrize("value", [0.0, 1e-12, 1e9])
def test_values_beyond_the_scales_range_stay_finite(value: float) -> None:
    weight = RoundToNearest().quantize(torch.full((32, 128), value), dtype=torch.float32)
    assert weight.dequantize().isfinite().all()


@pytest.mark.parametrize(("shape", "bits"), [((48, 64), 4), ((64, 48), 4), ((64, 64), 5)])
def test_what_gptq_cannot_hold_is_refused(shape: tuple[int, int], bits: int) -> None:
    weight = RoundToNearest(bits=bits, group_size=16).quantize(torch.ones(shape), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=f"{list(shape)}, {bits} bits".replace("[", r"\[")):
        weight.stored_tensors()
