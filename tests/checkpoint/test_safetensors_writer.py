"""Weights written tensor by tensor: the files the safetensors library would have written, in transformers' shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm.checkpoint.safetensors_writer import PendingTensor, write_safetensors, write_weights


def make_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.layers.10.weight": torch.randn(3, 5),
        "model.layers.2.weight": torch.randn(7, 2).bfloat16(),
        "a half": torch.randn(9).half(),
        "é": torch.randn(2, 2, 2, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
        "codes": torch.arange(7, dtype=torch.uint8),
        "steps": torch.arange(3),
        "turned": torch.randn(4, 6).t(),
    }


def pending(tensors: dict[str, Tensor]) -> list[PendingTensor]:
    return [
        PendingTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=partial(torch.clone, tensor))
        for name, tensor in tensors.items()
    ]


def test_a_file_is_byte_for_byte_the_libraries_own(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_safetensors(tmp_path / "ours", pending(tensors))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_shards_hold_what_the_hubs_own_would(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((size,), float(index)) for index, size in enumerate((3, 3, 3, 9, 1, 1, 40, 2))}
    write_weights(tmp_path, pending(tensors), max_shard_bytes=40)
    plan = split_torch_state_dict_into_shards(tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=40)
    assert len(plan.filename_to_tensors) > 2
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == sorted(plan.filename_to_tensors)
    for file, names in plan.filename_to_tensors.items():
        assert sorted(load_file(tmp_path / file)) == sorted(names)


def test_a_tensor_that_is_not_what_was_announced_stops_the_writing(tmp_path: Path) -> None:
    liar = PendingTensor(name="liar", shape=(2,), dtype=torch.float32, read=partial(torch.zeros, 3))
    with pytest.raises(ValueError, match="liar"):
        write_weights(tmp_path, [liar])
