"""Writing a Llama folder as a GGUF file, the way llama.cpp's convert_hf_to_gguf.py does.

Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel (permute, set_vocab, generate_extra_tensors).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(base: Path, path: Path, quantization: gguf.GGMLQuantizationType) -> Path:
    """Write `base` as a GGUF file whose matrices are quantised; afterwards `base` itself holds the rounded weights."""
    config = json.loads((base / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, config)
    write_tokenizer(writer, config["vocab_size"])
    tensors = load_file(base / "model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        projection = name.split(".")[-2]
        permuted = permute(array, heads[projection]) if projection in heads else array
        kind = quantization if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = quantize(permuted, kind)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            writer.add_tensor(gguf_name(name), data)
        else:
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        rounded = dequantize(data, kind)
        restored = unpermute(rounded, heads[projection]) if projection in heads else rounded
        tensors[name] = torch.from_numpy(np.ascontiguousarray(restored, dtype=np.float32))
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return path


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The byte-level vocabulary of `tests.tiny` and one merge, as llama.cpp stores GPT-2's."""
    alphabet = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*sorted(alphabet), "<s>", "</s>", "<pad>", "he"]
    assert len(tokens) == vocab_size
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * 256 + [control] * 3 + [normal])
    writer.add_token_merges(["h e"])  # readers need one
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """From transformers' half-split rotary rows to ggml's interleaved ones."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    shape = weight.shape
    return weight.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by."""
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    context = rope["original_max_position_embeddings"]
    low_wavelength, high_wavelength = context / rope["low_freq_factor"], context / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"
