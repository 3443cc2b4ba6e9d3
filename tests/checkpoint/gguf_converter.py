"""Tiny models of llama.cpp's architectures, written the way its conversion scripts write them.

Source: llama.cpp, conversion/*.py: set_gguf_parameters and modify_tensors of each model class. Tensor names are the
`gguf` package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

Kind = gguf.GGMLQuantizationType
Arch = gguf.MODEL_ARCH
VOCAB = 64
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
LLAMA_SIZES = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 2.0**-18,
}
GPT2_SIZES = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "layer_norm_epsilon": 2.0**-16}
FALCON_SIZES = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_epsilon": 2.0**-16,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model to convert.

    Args:
        arch: llama.cpp's architecture.
        model_type: transformers' name.
        config: the arguments of its config class.
        metadata: (config, writer) -> nothing; writes the architecture's keys.
        transform: (name, tensor, config) -> the tensor as the converter writes it.
    """

    arch: gguf.MODEL_ARCH
    model_type: str
    config: dict[str, Any]
    metadata: Callable[[PretrainedConfig, gguf.GGUFWriter], None]
    transform: Callable[[str, np.ndarray, PretrainedConfig], np.ndarray] = lambda name, tensor, config: tensor


def make_model(family: Family, folder: Path) -> PretrainedConfig:
    """Write a random model; norms and biases are random too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return config


def convert(family: Family, folder: Path, path: Path, kind: gguf.GGMLQuantizationType = Kind.F32) -> Path:
    """Write the model in `folder` as a GGUF file whose matrices are quantised."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    family.metadata(config, writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + index) for index in range(config.vocab_size - 1)] + ["!#"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["! #"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    names = gguf.get_tensor_name_map(family.arch, config.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        array = np.ascontiguousarray(family.transform(name, tensor.numpy(), config))
        if family.arch == Arch.GPT_OSS and ("experts." in name or name.endswith("sinks")):
            for target, part in gpt_oss_parts(name, array):
                add(writer, target, part, kind)
            continue
        if ".experts." in name:
            # The names of one tensor for all are listed as these.
            prefix, _, rest = name.replace("model.layers", "layers").partition(".experts.")
            merged = f"{prefix.replace('block_sparse_moe', 'feed_forward')}.experts.{rest[2:]}"
            merged = merged.replace("layers", "model.layers") if ".mlp." in merged else merged
            experts.setdefault(merged, []).append(array)
            continue
        # BLOOM's names are listed without the prefix.
        target = names.get_name(name, (".weight", ".bias")) or names.get_name(
            name.removeprefix("transformer."), (".weight", ".bias")
        )
        add(writer, target, array, kind)
    for name, arrays in experts.items():
        add(writer, names.get_name(name, (".weight",)), np.stack(arrays), kind)
    if rope_factors := config.to_dict().get("rope_parameters", {}).get("long_factor"):
        writer.add_tensor("rope_factors_long.weight", np.array(rope_factors, dtype=np.float32))
        short = config.rope_parameters["short_factor"]
        writer.add_tensor("rope_factors_short.weight", np.array(short, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if array.ndim == 1 or name.endswith(".bias") or kind == Kind.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)


def gpt_oss_parts(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Sinks and stacks of experts: gate and up apart, matrices as [out, in]."""
    layer = name.split(".")[2]
    if name.endswith("sinks"):
        return [(f"blk.{layer}.attn_sinks.weight", array)]
    kind = "bias" if name.endswith("_bias") else "weight"
    if kind == "weight":
        array = array.swapaxes(1, 2)
    if "down_proj" in name:
        return [(f"blk.{layer}.ffn_down_exps.{kind}", np.ascontiguousarray(array))]
    parts = (("ffn_gate_exps", array[:, ::2]), ("ffn_up_exps", array[:, 1::2]))
    return [(f"blk.{layer}.{module}.{kind}", np.ascontiguousarray(part)) for module, part in parts]


def generic_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (theta := config.rope_parameters.get("rope_theta")) is not None:
        writer.add_rope_freq_base(theta)
    if (width := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(width)
        writer.add_value_length(width)


def llama_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    generic_metadata(config, writer)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim or config.hidden_size // config.num_attention_heads)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def qwen_moe_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    generic_metadata(config, writer)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def gpt_oss_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    generic_metadata(config, writer)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gemma_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    """Gemma 1 and 2; the rotary base is not written."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def gemma2_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    gemma_metadata(config, writer)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    generic_metadata(config, writer)
    whole = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    writer.add_sliding_window(config.sliding_window)


def gpt2_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def starcoder_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    gpt2_metadata(config, writer)
    writer.add_head_count_kv(1)


def phi3_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    rope = config.rope_parameters
    generic_metadata(config, writer)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    rotary_share = int(rope.get("partial_rotary_factor", 1.0) * config.hidden_size)
    writer.add_rope_dimension_count(rotary_share // config.num_attention_heads)
    writer.add_sliding_window(config.sliding_window or 0)


def falcon_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def bloom_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(config.hidden_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def gptneox_metadata(config: PretrainedConfig, writer: gguf.GGUFWriter) -> None:
    width = config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * width))
    writer.add_head_count(config.num_attention_heads)
    writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_layer_norm_eps(config.layer_norm_eps)


def llama_rows(name: str, tensor: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, num_heads in heads.items():
        if f".{projection}." in name:
            halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def gemma_norms(name: str, tensor: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def gpt2_transposed(name: str, tensor: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    return tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor


def heads_apart(name: str, tensor: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """BLOOM and GPT-NeoX: from [q k v] of each head to all q, all k, all v."""
    if "query_key_value" not in name:
        return tensor
    heads = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
    return np.concatenate([heads[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])


def falcon_groups(name: str, tensor: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    if "query_key_value" not in name:
        return tensor
    num_kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    width = config.hidden_size // config.num_attention_heads
    groups = tensor.reshape(num_kv_heads, config.num_attention_heads // num_kv_heads + 2, width, config.hidden_size)
    parts = (groups[:, :-2], groups[:, [-2]], groups[:, [-1]])
    return np.concatenate([part.reshape(-1, config.hidden_size) for part in parts])


def rope(theta: float, **settings: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **settings}


LONGROPE = rope(
    10_000.0,
    rope_type="longrope",
    short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    partial_rotary_factor=0.75,
)
FAMILIES = {
    "llama": Family(
        arch=Arch.LLAMA,
        model_type="llama",
        config={**LLAMA_SIZES, "rope_parameters": rope(500_000.0)},
        metadata=llama_metadata,
        transform=llama_rows,
    ),
    "llama_with_biases": Family(
        arch=Arch.LLAMA,
        model_type="llama",
        config={**LLAMA_SIZES, "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
        metadata=llama_metadata,
        transform=llama_rows,
    ),
    "mixtral": Family(
        arch=Arch.LLAMA,
        model_type="mixtral",
        config={
            **LLAMA_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": rope(1e6),
        },
        metadata=llama_metadata,
        transform=llama_rows,
    ),
    "qwen2": Family(
        arch=Arch.QWEN2,
        model_type="qwen2",
        config={**LLAMA_SIZES, "rope_parameters": rope(1e6)},
        metadata=generic_metadata,
    ),
    "qwen2_tied": Family(
        arch=Arch.QWEN2,
        model_type="qwen2",
        config={**LLAMA_SIZES, "tie_word_embeddings": True},
        metadata=generic_metadata,
    ),
    "qwen3": Family(
        arch=Arch.QWEN3,
        model_type="qwen3",
        config={**LLAMA_SIZES, "head_dim": 128, "rope_parameters": rope(1e6)},
        metadata=generic_metadata,
    ),
    "qwen2moe": Family(
        arch=Arch.QWEN2MOE,
        model_type="qwen2_moe",
        config={
            **LLAMA_SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "rope_parameters": rope(1e6),
        },
        metadata=qwen_moe_metadata,
    ),
    "qwen3moe": Family(
        arch=Arch.QWEN3MOE,
        model_type="qwen3_moe",
        config={
            **LLAMA_SIZES,
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "rope_parameters": rope(1e6),
        },
        metadata=qwen_moe_metadata,
    ),
    "gpt_oss": Family(
        arch=Arch.GPT_OSS,
        model_type="gpt_oss",
        config={
            **LLAMA_SIZES,
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_parameters": rope(
                150_000.0,
                rope_type="yarn",
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        },
        metadata=gpt_oss_metadata,
    ),
    "gemma": Family(
        arch=Arch.GEMMA,
        model_type="gemma",
        config={**LLAMA_SIZES, "head_dim": 32},
        metadata=gemma_metadata,
        transform=gemma_norms,
    ),
    "gemma2": Family(
        arch=Arch.GEMMA2,
        model_type="gemma2",
        config={**LLAMA_SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
        metadata=gemma2_metadata,
        transform=gemma_norms,
    ),
    "gemma3": Family(
        arch=Arch.GEMMA3,
        model_type="gemma3_text",
        config={
            **LLAMA_SIZES,
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "rope_parameters": {
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
                "sliding_attention": rope(10_000.0),
            },
        },
        metadata=gemma3_metadata,
        transform=gemma_norms,
    ),
    "gpt2": Family(
        arch=Arch.GPT2, model_type="gpt2", config=GPT2_SIZES, metadata=gpt2_metadata, transform=gpt2_transposed
    ),
    "starcoder": Family(arch=Arch.STARCODER, model_type="gpt_bigcode", config=GPT2_SIZES, metadata=starcoder_metadata),
    "phi3": Family(arch=Arch.PHI3, model_type="phi3", config=LLAMA_SIZES, metadata=phi3_metadata),
    "phi3_long": Family(
        arch=Arch.PHI3,
        model_type="phi3",
        config={
            **LLAMA_SIZES,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 128,
            "sliding_window": 96,
            "tie_word_embeddings": True,
        },
        metadata=phi3_metadata,
    ),
    "falcon_7b": Family(
        arch=Arch.FALCON, model_type="falcon", config=FALCON_SIZES, metadata=falcon_metadata, transform=falcon_groups
    ),
    "falcon_40b": Family(
        arch=Arch.FALCON,
        model_type="falcon",
        config={**FALCON_SIZES, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
        metadata=falcon_metadata,
        transform=falcon_groups,
    ),
    "bloom": Family(
        arch=Arch.BLOOM,
        model_type="bloom",
        config={**TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 2.0**-16},
        metadata=bloom_metadata,
        transform=heads_apart,
    ),
    "gptneox": Family(
        arch=Arch.GPTNEOX,
        model_type="gpt_neox",
        config={
            **TOKENS,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "layer_norm_eps": 2.0**-16,
            "use_parallel_residual": False,
            "rope_parameters": rope(10_000.0, partial_rotary_factor=0.25),
        },
        metadata=gptneox_metadata,
        transform=heads_apart,
    ),
    "olmo2": Family(
        arch=Arch.OLMO2,
        model_type="olmo2",
        config={**LLAMA_SIZES, "rope_parameters": rope(500_000.0)},
        metadata=generic_metadata,
    ),
}
