"""Models quantised by the libraries whose formats they are in, each beside the same values in full precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import gguf
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from tests.parity.gguf_writer import write_gguf
from tests.quantization.integer_packer import IntegerMatrix, random_integers
from tests.tiny import edit_json, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class QuantizedBase:
    """quantized: what Graft loads. exact: a folder with the same values in float32, for the oracle."""

    quantized: Path
    exact: Path


def bitsandbytes_base(base: Path, folder: Path, **config: Any) -> QuantizedBase:
    """Quantised and saved by transformers. config: of transformers' BitsAndBytesConfig."""
    model = open_with_bitsandbytes(base, BitsAndBytesConfig(**config))
    model.save_pretrained(folder / "quantized")
    write_tokenizer(folder / "quantized")
    turned = [name for name, module in AutoModelForCausalLM.from_pretrained(base).named_modules() if is_conv1d(module)]
    matrices = {}
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            matrix = _dequantized(module)
            matrices[f"{name}.weight"] = matrix.t() if name in turned else matrix
    return QuantizedBase(quantized=folder / "quantized", exact=with_matrices(base, folder / "exact", matrices))


def open_with_bitsandbytes(base: Path, config: BitsAndBytesConfig | None = None) -> Any:
    """A model that transformers quantises while loading, or that is quantised already; in training mode, in which
    bitsandbytes dequantises exactly instead of rounding everything to bfloat16."""
    asked = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(
        base, **asked, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
    ).train()


def is_conv1d(module: object) -> bool:
    return isinstance(module, Conv1D)


def _dequantized(module: Any) -> Tensor:
    weight = module.weight
    if isinstance(module, bnb.nn.Linear4bit):
        matrix: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        return matrix
    scaled: Tensor = bnb.functional.int8_vectorwise_dequant(weight.CB, weight.SCB)
    return scaled


def gguf_base(base: Path, folder: Path, kind: gguf.GGMLQuantizationType) -> QuantizedBase:
    """A Llama with every matrix in blocks, the token table and the head included."""
    exact = Path(shutil.copytree(base, folder / "exact"))
    return QuantizedBase(quantized=write_gguf(exact, folder / "model.gguf", kind), exact=exact)


def with_matrices(base: Path, folder: Path, matrices: dict[str, Tensor]) -> Path:
    """A copy of a model with some tensors replaced."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    unknown = matrices.keys() - tensors.keys()
    assert not unknown, unknown
    replaced = tensors | {name: matrix.float().contiguous() for name, matrix in matrices.items()}
    save_file(replaced, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# What the linear modules of Llama, Gemma and GPTBigCode are called.
LINEAR_WEIGHTS = ("proj.weight", "c_attn.weight", "c_fc.weight")

# Path and original matrix of a module -> the tensors that store it, and what they stand for.
Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def packed_base(base: Path, folder: Path, pack: Pack, *, config: dict[str, Any], head: bool) -> QuantizedBase:
    """A model with its linear modules stored otherwise. config: its quantization_config. head: whether that, too."""
    tensors = load_file(base / "model.safetensors")
    matrices: dict[str, Tensor] = {}
    for name in sorted(tensors):
        if name.endswith(LINEAR_WEIGHTS) or (head and name == "lm_head.weight"):
            stored, matrices[name] = pack(name.removesuffix(".weight"), tensors.pop(name))
            tensors |= stored
    shutil.copytree(base, folder / "quantized")
    save_file(tensors, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "quantized" / "config.json", quantization_config=config)
    return QuantizedBase(quantized=folder / "quantized", exact=with_matrices(base, folder / "exact", matrices))


def _integers(path: str, matrix: Tensor, **options: Any) -> IntegerMatrix:
    outputs, inputs = matrix.shape
    packed = random_integers(inputs=inputs, outputs=outputs, seed=len(path), **options)
    # About as loud as the matrix they stand in for.
    return replace(packed, scales=packed.scales * 0.4)


def pack_gptq(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With act-order: groups all over the inputs."""
    packed = _integers(path, matrix, shuffled=True)
    return packed.gptq(path), packed.expected()


def pack_awq(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    packed = _integers(path, matrix)
    return packed.awq(path), packed.expected()


def pack_fp8(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = matrix.abs().amax(dim=1, keepdim=True) / 448
    values = (matrix / scale).to(torch.float8_e4m3fn)
    return {f"{path}.weight": values, f"{path}.weight_scale": scale}, values.float() * scale


def pack_compressed(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As the compressed-tensors library stores four bits."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**COMPRESSED_INT4))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    scale = matrix.unflatten(1, (-1, COMPRESSED_INT4["group_size"])).abs().amax(dim=2) / 7
    compressed = dict(compressor.compress({"weight": matrix, "weight_scale": scale}, scheme))
    exact: Tensor = compressor.decompress(dict(compressed), scheme)["weight"]
    return {f"{path}.{role}": tensor for role, tensor in compressed.items()}, exact


Maker = Callable[[Path, Path], QuantizedBase]


def _packed(pack: Pack, *, head: bool, **config: Any) -> Maker:
    return lambda base, folder: packed_base(base, folder, pack, config=config, head=head)


def _bitsandbytes(**config: Any) -> Maker:
    return lambda base, folder: bitsandbytes_base(base, folder, **config)


def _gguf(kind: gguf.GGMLQuantizationType) -> Maker:
    return lambda base, folder: gguf_base(base, folder, kind)


NF4_DOUBLE: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}
COMPRESSED_INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
# A skip list that names no module takes the head off transformers' own.
WITH_HEAD = {"llm_int8_skip_modules": ["nothing"]}
FORMATS: dict[str, Maker] = {
    "nf4_double": _bitsandbytes(**NF4_DOUBLE),
    "nf4_head": _bitsandbytes(**NF4_DOUBLE, **WITH_HEAD),
    "nf4_stored_as_bfloat16": _bitsandbytes(**NF4_DOUBLE, bnb_4bit_quant_storage=torch.bfloat16),
    "fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "int8": _bitsandbytes(load_in_8bit=True),
    "int8_head": _bitsandbytes(load_in_8bit=True, **WITH_HEAD),
    "gptq": _packed(pack_gptq, head=True, quant_method="gptq", bits=4, group_size=16, desc_act=True, lm_head=True),
    # Eight columns share a word, and 260 of the head are no whole number of words.
    "awq": _packed(pack_awq, head=False, quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm"),
    "fp8": _packed(pack_fp8, head=True, quant_method="fp8", activation_scheme="dynamic"),
    "compressed_tensors": _packed(
        pack_compressed,
        head=True,
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups={"group_0": {"targets": ["Linear"], "weights": COMPRESSED_INT4, "input_activations": None}},
    ),
    "q4_0": _gguf(gguf.GGMLQuantizationType.Q4_0),
    "q8_0": _gguf(gguf.GGMLQuantizationType.Q8_0),
}
