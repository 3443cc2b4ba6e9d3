"""The same model and adapter in the files llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from safetensors.numpy import load_file

PREFIX = "base_model.model."
TYPES = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}


def write_gguf(source: Path, target: Path, dtype: str) -> Path:
    """A GGUF file with its matrices dequantised to one dtype; vectors are float32, as llama.cpp wants them."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, str(architecture))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = TYPES[dtype] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    return _finish(writer, target)


def write_gguf_adapter(source: Path, target: Path) -> Path:
    """A PEFT folder's LoRA on a Llama, for timing: rows of q and k stay in Hugging Face's order, and answers differ."""
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    num_layers = 1 + max(int(name.split(".layers.")[1].split(".")[0]) for name in tensors)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers)
    writer = GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, values in tensors.items():
        module, factor = name.removeprefix(PREFIX).removesuffix(".weight").rsplit(".lora_", 1)
        writer.add_tensor(f"{names.get_name(module)}.weight.lora_{factor.lower()}", values)
    return _finish(writer, target)


def _finish(writer: GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
