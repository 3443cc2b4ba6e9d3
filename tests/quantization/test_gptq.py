"""GPTQ checkpoints mean what their description says, or are refused by the tensor's or the setting's name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graftlm.errors import CheckpointError
from graftlm.quantization.gptq import GPTQFormat
from graftlm.quantization.grouped_integers import GroupedIntegers
from tests.quantization.integer_packer import random_integers
from tests.quantization.memory_tensors import MemoryTensors

PATH = "model.layers.3.mlp.down_proj"
CPU = torch.device("cpu")
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}


def read(
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    *,
    path: str = PATH,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> GroupedIntegers:
    reader = GPTQFormat({**CONFIG, **config})
    return reader.read(MemoryTensors(tensors), path, shape=shape, dtype=dtype, device=CPU)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in_order", "act_order"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_both_versions_give_the_packed_matrix(bits: int, group_size: int, symmetric: bool, shuffled: bool) -> None:
    """R031 and R032: the group index counts, and -1 is one group."""
    packed = random_integers(bits=bits, group_size=group_size, symmetric=symmetric, shuffled=shuffled)
    config = {"bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": shuffled}
    for version, offset in (("gptq", 1), ("gptq_v2", 0)):
        weight = read(packed.gptq(PATH, offset=offset), packed.shape, checkpoint_format=version, **config)
        assert torch.equal(weight.dequantize(), packed.expected())
        assert weight.shape == packed.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_compute_dtypes_round_once(dtype: torch.dtype) -> None:
    packed = random_integers()
    weight = read(packed.gptq(PATH), packed.shape, dtype=dtype)
    assert torch.equal(weight.dequantize(), packed.expected().to(dtype))


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_parts_and_products_are_those_of_the_matrix(shuffled: bool) -> None:
    packed = random_integers(shuffled=shuffled)
    weight = read(packed.gptq(PATH), packed.shape)
    matrix = packed.expected()
    ids = torch.tensor([5, 0, 31, 5])
    assert torch.equal(weight.rows(ids), matrix[ids])
    assert weight.rows(ids[:0]).shape == (0, 64)
    part = weight.part(7, 20)
    assert torch.equal(part.dequantize(), matrix[7:20])
    assert torch.equal(part.part(2, 5).rows(torch.tensor([1])), matrix[10:11])
    x, bias = torch.randn(3, 64), torch.randn(32)
    assert torch.equal(weight.matmul(x, bias), functional.linear(x, matrix, bias))


def test_a_part_takes_no_memory_of_its_own() -> None:
    packed = random_integers()
    weight = read(packed.gptq(PATH), packed.shape)
    part = weight.part(4, 8)
    for whole, own in ((weight.codes.stream, part.codes.stream), (weight.scale, part.scale), (weight.zero, part.zero)):
        assert whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


def test_four_bits_stay_packed() -> None:
    packed = random_integers(inputs=256, outputs=32, group_size=128)
    weight = read(packed.gptq(PATH), packed.shape, group_size=128)
    assert weight.num_bytes <= 0.57 * 256 * 32
    assert weight.format == "int4, groups of 128"


def test_a_missing_group_index_means_consecutive_groups() -> None:
    packed = random_integers()
    tensors = packed.gptq(PATH)
    del tensors[f"{PATH}.g_idx"]
    assert torch.equal(read(tensors, packed.shape).dequantize(), packed.expected())


@pytest.mark.parametrize("blank", [0, -1])
def test_a_blank_group_index_means_consecutive_groups(blank: int) -> None:
    packed = random_integers()
    tensors = {**packed.gptq(PATH), f"{PATH}.g_idx": torch.full((64,), blank, dtype=torch.int32)}
    assert torch.equal(read(tensors, packed.shape).dequantize(), packed.expected())


def test_the_last_group_may_be_shorter() -> None:
    """R032."""
    packed = random_integers(inputs=96, group_size=64)
    tensors = packed.gptq(PATH)
    assert torch.equal(read(tensors, packed.shape, group_size=64).dequantize(), packed.expected())
    del tensors[f"{PATH}.g_idx"]
    assert torch.equal(read(tensors, packed.shape, group_size=64).dequantize(), packed.expected())


def test_groups_that_do_not_fit_are_refused_with_both_numbers() -> None:
    """R032."""
    packed = random_integers(inputs=96, group_size=20)
    tensors = packed.gptq(PATH)
    del tensors[f"{PATH}.g_idx"]
    tensors[f"{PATH}.scales"] = tensors[f"{PATH}.scales"].repeat(2, 1)[:7]
    tensors[f"{PATH}.qzeros"] = tensors[f"{PATH}.qzeros"].repeat(2, 1)[:7]
    with pytest.raises(CheckpointError, match=r"down_proj\.scales.*\[7, 32\].*96 inputs.*group_size is 64"):
        read(tensors, packed.shape, group_size=64)


def test_a_matrix_of_one_word_per_output() -> None:
    packed = random_integers(inputs=8, outputs=8, group_size=4)
    assert torch.equal(read(packed.gptq(PATH), packed.shape, group_size=4).dequantize(), packed.expected())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_zero_leaves_its_neighbours_alone(bits: int) -> None:
    packed = random_integers(bits=bits)
    packed.zeros[:, ::3] = 0
    assert torch.equal(read(packed.gptq(PATH), packed.shape, bits=bits).dequantize(), packed.expected())


@pytest.mark.parametrize(("said", "offset"), [("gptq", 0), ("gptq_v2", 1)])
def test_symmetric_zero_points_tell_the_version(said: str, offset: int, caplog: pytest.LogCaptureFixture) -> None:
    packed = random_integers(symmetric=True)
    with caplog.at_level(logging.WARNING):
        weight = read(packed.gptq(PATH, offset=offset), packed.shape, sym=True, checkpoint_format=said)
    assert torch.equal(weight.dequantize(), packed.expected())
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["checkpoint_format"]


def test_the_tensors_win_over_the_config_and_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    packed = random_integers(bits=8, group_size=32)
    reader = GPTQFormat({**CONFIG, "bits": 4, "group_size": 16})
    with caplog.at_level(logging.WARNING):
        for path in (PATH, "lm_head"):
            tensors = MemoryTensors(packed.gptq(path))
            weight = reader.read(tensors, path, shape=packed.shape, dtype=torch.float32, device=CPU)
            assert torch.equal(weight.dequantize(), packed.expected())
    told = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(told) == ["bits", "group_size"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("group_size", 32), ("group_size", -1), ("desc_act", False), ("sym", True), ("lm_head", False)],
)
def test_act_order_zero_points_and_a_quantised_head_win_too(
    setting: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    packed = random_integers(group_size=16, shuffled=True)
    agreeing = {**CONFIG, "desc_act": True, "lm_head": True}
    for config, told in ((agreeing, []), ({**agreeing, setting: value}, [setting])):
        with caplog.at_level(logging.WARNING):
            weight = GPTQFormat(config).read(
                MemoryTensors(packed.gptq("lm_head")), "lm_head", shape=packed.shape, dtype=torch.float32, device=CPU
            )
        assert torch.equal(weight.dequantize(), packed.expected())
        assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == told


def test_dynamic_rules_set_the_sizes_of_the_modules_they_match(caplog: pytest.LogCaptureFixture) -> None:
    rules = {
        r"-:.*\.gate_proj": {},
        r"+:.*layers\.3\..*": {"bits": 8, "group_size": 64},
        r".*\.down_proj": {"bits": 2},
    }
    first = random_integers(inputs=96, bits=8, group_size=64)
    second = random_integers(bits=2)
    third = random_integers()
    other = "model.layers.4.mlp.down_proj"
    skipped = "model.layers.3.mlp.gate_proj"
    with caplog.at_level(logging.WARNING):
        weight = read(first.gptq(PATH), first.shape, dynamic=rules)
        assert torch.equal(weight.dequantize(), first.expected())
        weight = read(second.gptq(other), second.shape, path=other, dynamic=rules)
        assert torch.equal(weight.dequantize(), second.expected())
        assert not caplog.records
        weight = read(third.gptq(skipped), third.shape, path=skipped, dynamic=rules)
    assert torch.equal(weight.dequantize(), third.expected())
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["dynamic"]


def test_modules_are_quantised_where_their_tensors_are_lm_head_included() -> None:
    packed = random_integers()
    tensors = MemoryTensors(
        {
            **packed.gptq("lm_head"),
            "lm_head.bias": torch.zeros(32),
            f"{PATH}.weight": torch.zeros(32, 64),
            f"{PATH}.input_scale": torch.ones(1),
        }
    )
    reader = GPTQFormat({**CONFIG, "lm_head": False})
    assert reader.stores(tensors, "lm_head")
    assert not reader.stores(tensors, PATH)
    assert reader.tensor_names(tensors, "lm_head") == set(packed.gptq("lm_head"))
    assert reader.tensor_names(tensors, PATH) == {f"{PATH}.input_scale"}
    weight = reader.read(tensors, "lm_head", shape=packed.shape, dtype=torch.float32, device=CPU)
    assert torch.equal(weight.dequantize(), packed.expected())


def test_a_quantize_config_of_old_is_read() -> None:
    packed = random_integers(symmetric=True)
    old = {
        "bits": 4,
        "group_size": 16,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
    }
    weight = GPTQFormat(old).read(
        MemoryTensors(packed.gptq(PATH)), PATH, shape=packed.shape, dtype=torch.float32, device=CPU
    )
    assert torch.equal(weight.dequantize(), packed.expected())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bits": 5}, "bits"),
        ({"bits": "four"}, "bits"),
        ({"bits": True}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"group_size": "all"}, "group_size"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format.*bitblas"),
        ({"format": "gptq_p"}, "checkpoint_format.*gptq_p"),
        ({"checkpoint_format": 3}, "checkpoint_format"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"sym": "yes"}, "sym"),
        ({"dynamic": [1]}, "dynamic"),
        ({"dynamic": {"+:(": {}}}, "dynamic.*regular expression"),
        ({"dynamic": {"+:a": {"bits": 5}}}, r"dynamic\['\+:a'\]\.bits"),
        ({"dynamic": {"+:a": 5}}, r"dynamic\['\+:a'\]"),
    ],
)
def test_unknown_settings_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        GPTQFormat({**CONFIG, **config})


def test_a_pattern_that_never_ends_is_given_up_on() -> None:
    packed = random_integers()
    with pytest.raises(CheckpointError, match="takes too long"):
        read(packed.gptq(PATH), packed.shape, dynamic={r"(?:(?:.+?)+?\W?)+?[A-Z]": {"bits": 4}})


@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(role: str) -> None:
    packed = random_integers()
    tensors = packed.gptq(PATH)
    del tensors[f"{PATH}.{role}"]
    with pytest.raises(CheckpointError, match=rf"down_proj\.{role} is missing"):
        read(tensors, packed.shape)


@pytest.mark.parametrize("change", ["shorter", "longer", "narrower", "wider", "flat", "empty", "scalar", "floats"])
@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_tensor_of_another_shape_or_dtype_is_named(role: str, change: str) -> None:
    packed = random_integers(group_size=24, inputs=96)
    tensors = packed.gptq(PATH)
    whole = tensors[f"{PATH}.{role}"]
    tensors[f"{PATH}.{role}"] = {
        "shorter": whole[:-1],
        "longer": torch.cat([whole, whole[:1]]),
        "narrower": whole[..., :-1],
        "wider": torch.cat([whole, whole], dim=-1),
        "flat": whole[None].clone(),
        "empty": whole[:0],
        "scalar": whole.flatten()[0],
        "floats": whole.to(torch.float64),
    }[change]
    # Where the scales are at fault, the zero points no longer fit them.
    with pytest.raises(CheckpointError, match=rf"down_proj\.({role}{'|qzeros' if role == 'scales' else ''}) "):
        read(tensors, packed.shape, group_size=24)


@pytest.mark.parametrize("group", [-1, 4, 2**31 - 1])
def test_a_group_index_out_of_range_is_refused(group: int) -> None:
    packed = random_integers(shuffled=True)
    tensors = packed.gptq(PATH)
    tensors[f"{PATH}.g_idx"][9] = group
    with pytest.raises(CheckpointError, match=r"down_proj\.g_idx names groups.*allowed: 0 to 3"):
        read(tensors, packed.shape)
