"""What the compressed-tensors library compresses is read as what it decompresses, bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.compressed_tensors import CompressedTensorsFormat
from graftlm.quantization.row_weight import RowWeight
from tests.quantization.integer_packer import signed_words
from tests.quantization.memory_tensors import MemoryTensors

PATH = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")
ROWS, COLUMNS = SHAPE = (48, 128)
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}


def config(format_name: str, *, targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


def compress(
    format_name: str, scale: Tensor, zero_point: Tensor | None = None, global_scale: Tensor | None = None, **args: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """A random matrix's tensors as the library stores them, and the matrix it makes of them again."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(format_name)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(scale.dtype)
    state = {"weight": weight, "weight_scale": scale}
    if zero_point is not None:
        state["weight_zero_point"] = zero_point
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    compressed = compressor.compress(state, scheme)
    return dict(compressed), compressor.decompress(compressed, scheme)["weight"]


def read(tensors: dict[str, Tensor], settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> RowWeight:
    stored = MemoryTensors({f"{PATH}.{role}": tensor for role, tensor in tensors.items()})
    return CompressedTensorsFormat(settings).read(stored, PATH, shape=SHAPE, dtype=dtype, device=CPU)


def check(weight: RowWeight, expected: Tensor) -> None:
    assert expected.float().std() > 1e-2
    assert torch.equal(weight.dequantize(), expected)
    ids = torch.tensor([47, 0, 47])
    assert torch.equal(weight.rows(ids), expected[ids])
    assert torch.equal(weight.part(5, 40).part(1, 3).dequantize(), expected[6:8])


def random_scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1


def random_exponents(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-6, 2, shape, generator=torch.Generator().manual_seed(1)).float()).bfloat16()


def random_zero_points(bits: int, *shape: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_integers(bits: int, strategy: str, symmetric: bool) -> None:
    args: dict[str, Any] = {"num_bits": bits, "strategy": strategy, "symmetric": symmetric}
    num_groups = 1
    if strategy == "group":
        args["group_size"], num_groups = 32, 4
    zero_point = None if symmetric else random_zero_points(bits, ROWS, num_groups)
    tensors, expected = compress("pack-quantized", random_scales(ROWS, num_groups), zero_point, **args)
    check(read(tensors, config("pack-quantized", **args)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_half_precision(dtype: torch.dtype) -> None:
    scale = random_scales(ROWS, 4).to(dtype)
    tensors, expected = compress("pack-quantized", scale, random_zero_points(4, ROWS, 4), symmetric=False, **INT4)
    weight = read(tensors, config("pack-quantized", symmetric=False, **INT4), dtype)
    check(weight, expected)
    assert weight.num_bytes == ROWS * (COLUMNS // 2 + 4 * 2 + 4)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_that_older_versions_pad(bits: int) -> None:
    """Codes of a word side by side from the lowest bits, as many as fit whole; written from that description."""
    args = {**INT4, "num_bits": bits, "symmetric": False}
    dense, expected = compress("pack-quantized", random_scales(ROWS, 4), random_zero_points(bits, ROWS, 4), **args)
    half = 1 << (bits - 1)
    steps = (expected.view(ROWS, 4, 32) / dense["weight_scale"][..., None]).round().int()
    codes = (steps + random_zero_points(bits, ROWS, 4)[..., None].int() + half).view(ROWS, COLUMNS)
    zeros = random_zero_points(bits, ROWS, 4).int() + half
    padded = {
        **dense,
        "weight_packed": signed_words([padded_line(line, bits) for line in codes.tolist()]),
        "weight_zero_point": signed_words([padded_line(line, bits) for line in zeros.T.tolist()]).T.contiguous(),
    }
    assert padded["weight_packed"].shape != dense["weight_packed"].shape
    check(read(padded, config("pack-quantized", **args)), expected)


def padded_line(codes: list[int], bits: int) -> list[int]:
    per_word = 32 // bits
    words = [codes[start : start + per_word] for start in range(0, len(codes), per_word)]
    return [sum(code << (bits * place) for place, code in enumerate(word)) for word in words]


def test_groups_in_activation_order() -> None:
    """Versions up to 0.12 store which group a column belongs to; the columns stay in place."""
    tensors, _ = compress("pack-quantized", random_scales(ROWS, 4), **INT4)
    codes, _ = compress("pack-quantized", torch.ones(ROWS, 4), **INT4)
    tensors["weight_packed"] = codes["weight_packed"]
    integers = read(codes, config("pack-quantized", **INT4)).dequantize()
    index = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3)) // 32
    tensors["weight_g_idx"] = index.int()
    check(read(tensors, config("pack-quantized", **INT4)), integers * tensors["weight_scale"][:, index])
    tensors["weight_g_idx"] = torch.full((COLUMNS,), -1, dtype=torch.int32)
    in_order = tensors["weight_scale"].repeat_interleave(32, dim=1)
    check(read(tensors, config("pack-quantized", **INT4)), integers * in_order)
    tensors["weight_g_idx"][3] = 4
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_g_idx names groups"):
        read(tensors, config("pack-quantized", **INT4))


@pytest.mark.parametrize("format_name", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("scale_shape", "args"),
    [
        ((1,), {"strategy": "tensor"}),
        ((ROWS, 1), {"strategy": "channel"}),
        ((ROWS, 4), {"strategy": "group", "group_size": 32}),
        ((2, 3), {"strategy": "block", "block_structure": [32, 48]}),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_plain_integers(format_name: str, scale_shape: tuple[int, ...], args: dict[str, Any], symmetric: bool) -> None:
    args = {"num_bits": 8, "symmetric": symmetric, **args}
    zero_point = None if symmetric else random_zero_points(8, *scale_shape)
    tensors, expected = compress(format_name, random_scales(*scale_shape) / 30, zero_point, **args)
    check(read(tensors, config(format_name, **args)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format_name", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("scale_shape", "args"),
    [
        ((1,), {"strategy": "tensor"}),
        ((ROWS, 1), {"strategy": "channel"}),
        ((ROWS, 4), {"strategy": "group", "group_size": 32}),
        ((2, 3), {"strategy": "block", "block_structure": [32, 48]}),
    ],
)
def test_eight_bit_floats(
    format_name: str, scale_shape: tuple[int, ...], args: dict[str, Any], dtype: torch.dtype
) -> None:
    args = {"num_bits": 8, "type": "float", **args}
    tensors, expected = compress(format_name, random_scales(*scale_shape).to(dtype), **args)
    check(read(tensors, config(format_name, **args), dtype), expected)


def test_nvfp4() -> None:
    scale, global_scale = random_scales(ROWS, 8) * 100, torch.tensor([377.3])
    dtype = {"scale_dtype": torch.float8_e4m3fn}
    tensors, expected = compress("nvfp4-pack-quantized", scale, global_scale=global_scale, **NVFP4, **dtype)
    settings = config("nvfp4-pack-quantized", **NVFP4)
    # The library computes in float32 and stores the result in bfloat16.
    check(read(tensors, settings, torch.bfloat16), expected)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes])
    packed = tensors["weight_packed"].int()
    values = table[torch.stack([packed & 15, packed >> 4], dim=-1).view(SHAPE)]
    effective = (tensors["weight_scale"].float() / global_scale).repeat_interleave(16, dim=1)
    check(read(tensors, settings), values * effective)
    assert read(tensors, settings).num_bytes == ROWS * (COLUMNS // 2 + 8) + 4


def test_mxfp4() -> None:
    args = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    scale = random_exponents(ROWS, 4)
    tensors, expected = compress("mxfp4-pack-quantized", scale, scale_dtype=torch.uint8, **args)
    check(read(tensors, config("mxfp4-pack-quantized", **args), torch.bfloat16), expected)
    # A power of two times four bits is exact.
    check(read(tensors, config("mxfp4-pack-quantized", **args)), expected.float())


def test_mxfp8() -> None:
    args = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    scale = random_exponents(ROWS, 4)
    tensors, expected = compress("mxfp8-quantized", scale, scale_dtype=torch.uint8, **args)
    check(read(tensors, config("mxfp8-quantized", **args), torch.bfloat16), expected)


def test_a_scheme_that_names_a_module_goes_before_one_for_its_class(caplog: pytest.LogCaptureFixture) -> None:
    # 7 bits padded and 8 bits take the same room: only the scheme tells them apart.
    args = {**INT4, "num_bits": 8}
    tensors, expected = compress("pack-quantized", random_scales(ROWS, 4), **args)
    for target in (PATH, r"re:.*up_proj$"):
        settings = config("mixed-precision", **INT4 | {"num_bits": 7})
        settings["config_groups"]["group_1"] = {"targets": [target], "weights": args, "format": "pack-quantized"}
        check(read(tensors, settings), expected)
    assert not caplog.records


def test_the_tensors_win_over_the_config_and_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tensors, expected = compress("pack-quantized", random_scales(ROWS, 4), **INT4)
    stored = MemoryTensors({f"{path}.{role}": tensor for role, tensor in tensors.items() for path in (PATH, "lm_head")})
    reader = CompressedTensorsFormat(config("pack-quantized", num_bits=6, strategy="group", group_size=64))
    with caplog.at_level(logging.WARNING):
        for path in (PATH, "lm_head"):
            check(reader.read(stored, path, shape=SHAPE, dtype=torch.float32, device=CPU), expected)
    assert len(caplog.records) == 2


def test_modules_are_quantised_where_their_tensors_are(caplog: pytest.LogCaptureFixture) -> None:
    known = {f"{PATH}.weight_packed", f"{PATH}.weight_scale", f"{PATH}.weight_shape", f"{PATH}.input_global_scale"}
    tensors = MemoryTensors(
        dict.fromkeys(known, torch.ones(1))
        | {"lm_head.weight": torch.ones(2, 2), "head.weight": torch.ones(1), "head.weight_scale": torch.ones(1)}
    )
    settings = config("pack-quantized", **INT4)
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    settings["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    with caplog.at_level(logging.INFO):
        reader = CompressedTensorsFormat(settings)
    assert len(caplog.records) == 2
    assert reader.stores(tensors, PATH)
    assert reader.stores(tensors, "head")
    assert not reader.stores(tensors, "lm_head")
    assert reader.tensor_names(tensors, PATH) == known


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"format": "marlin-24"}, "format.*marlin-24"),
        ({"format": "sparse-24-bitmask"}, "format.*sparse-24-bitmask"),
        ({"format": "mxfp6-pack-quantized"}, "format.*mxfp6"),
        ({"format": 4}, "format"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, r"sparsity_config\.format.*sparse-bitmask"),
        ({"transform_config": {"config_groups": {"v": {}}}}, "transform_config"),
        ({"config_groups": {"a": ["Linear"]}}, r"config_groups\.a"),
        ({"config_groups": [1]}, "config_groups"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "targets"),
        ({"config_groups": {"a": {"targets": ["re:("]}}}, "targets"),
        ({"config_groups": {"a": {"format": "marlin-24"}}}, r"config_groups\.a\.format"),
        ({"config_groups": {"a": {"weights": {"num_bits": 9}}}}, "num_bits"),
        ({"config_groups": {"a": {"weights": {"strategy": "token"}}}}, "strategy"),
        ({"config_groups": {"a": {"weights": {"group_size": 0}}}}, "group_size"),
        ({"config_groups": {"a": {"weights": {"strategy": "block", "block_structure": "8x"}}}}, "block_structure"),
    ],
)
def test_unknown_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        CompressedTensorsFormat({**config("pack-quantized", **INT4), **settings})


@pytest.mark.parametrize("change", ["missing", "shorter", "narrower", "flat", "empty", "scalar", "doubles"])
@pytest.mark.parametrize("role", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
def test_a_damaged_tensor_of_packed_integers_is_named(role: str, change: str) -> None:
    tensors, expected = compress(
        "pack-quantized", random_scales(ROWS, 4), random_zero_points(4, ROWS, 4), symmetric=False, **INT4
    )
    settings = config("pack-quantized", symmetric=False, **INT4)
    whole = tensors.pop(role)
    if change == "missing" and role == "weight_shape":
        check(read(tensors, settings), expected)
        return
    named = rf"up_proj\.({role}{'|weight' if role == 'weight_packed' else ''}) "
    if change != "missing":
        tensors[role] = {
            "shorter": whole[:-1],
            "narrower": whole[..., :-1],
            "flat": whole[None].clone(),
            "empty": whole[:0],
            "scalar": whole.flatten()[0],
            "doubles": whole.double(),
        }[change]
    if (role, change) == ("weight_scale", "scalar"):
        # One scale is a strategy of its own; what no longer fits is the zero points.
        named = r"up_proj\.weight_zero_point "
    if (role, change) == ("weight_scale", "narrower"):
        named = r"up_proj\.weight_scale "
    with pytest.raises(CheckpointError, match=named):
        read(tensors, settings)


@pytest.mark.parametrize("change", ["missing", "shorter", "narrower", "flat", "empty", "doubles"])
@pytest.mark.parametrize("role", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_a_damaged_tensor_of_four_bit_floats_is_named(role: str, change: str) -> None:
    tensors = nvfp4()
    whole = tensors.pop(role)
    if change != "missing":
        tensors[role] = {
            "shorter": whole[:-1],
            "narrower": whole[..., :-1],
            "flat": whole[None].clone(),
            "empty": whole[:0],
            "doubles": whole.double(),
        }[change]
    with pytest.raises(CheckpointError, match=rf"up_proj\.({role}{'|weight' if role == 'weight_packed' else ''}) "):
        read(tensors, config("nvfp4-pack-quantized", **NVFP4))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_that_is_none_is_named(value: float) -> None:
    tensors = {**nvfp4(), "weight_global_scale": torch.tensor([value])}
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_global_scale is no scale"):
        read(tensors, config("nvfp4-pack-quantized", **NVFP4))


def nvfp4() -> dict[str, Tensor]:
    scale, global_scale = random_scales(ROWS, 8) * 100, torch.tensor([300.0])
    return compress("nvfp4-pack-quantized", scale, global_scale=global_scale, scale_dtype=torch.float8_e4m3fn, **NVFP4)[
        0
    ]


def test_a_shape_that_is_not_the_models_is_refused() -> None:
    tensors, _ = compress("pack-quantized", random_scales(ROWS, 4), **INT4)
    tensors["weight_shape"] = torch.tensor([ROWS, COLUMNS - 1])
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape contradicts.*\[48, 127\].*\[48, 128\]"):
        read(tensors, config("pack-quantized", **INT4))


def test_zero_points_that_the_codes_cannot_mean_are_refused() -> None:
    args = {"num_bits": 8, "type": "float", "strategy": "channel"}
    tensors, expected = compress("float-quantized", random_scales(ROWS, 1), **args)
    tensors["weight_zero_point"] = torch.zeros(ROWS, 1).to(torch.float8_e4m3fn)
    check(read(tensors, config("float-quantized", **args)), expected)
    tensors["weight_zero_point"][3] = 1
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_zero_point"):
        read(tensors, config("float-quantized", **args))
    tensors, _ = compress("pack-quantized", random_scales(ROWS, 4), **INT4)
    tensors["weight_zero_point"] = torch.full((ROWS, 4), 9, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_zero_point.*4 bits"):
        read(tensors, config("pack-quantized", **INT4))
