"""GGUF files, presented under Hugging Face's config keys and tensor names. Weights are dequantised to float32 on
reading, by the `gguf` package, which defines what the formats mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from graftlm.errors import CheckpointError

# llama.cpp's names on the left, transformers' on the right; {} is the layer.
LLAMA_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
# Per-frequency divisors of the rotary embedding (Llama 3): part of the config here, not a weight.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Architecture:
    names: Mapping[str, str]
    config: Callable[[GGUFCheckpoint], dict[str, Any]]


class GGUFCheckpoint:
    """A `Checkpoint` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as cause:
            raise CheckpointError(f"{path.name} is not a readable GGUF file", got=str(cause)[:200]) from cause
        architecture = str(self.field("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path.name} holds a model Graft cannot read from GGUF",
                got=architecture,
                allowed=", ".join(sorted(ARCHITECTURES)),
            )
        self._prefix = architecture
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._source_names = self._map_names(ARCHITECTURES[self._prefix].names, path)
        self.config: Mapping[str, Any] = ARCHITECTURES[self._prefix].config(self)
        self.generation_config: Mapping[str, Any] = {"eos_token_id": self._end_token_ids()}
        self.tokenizer_files: tuple[Path, str | None] = (path.parent, path.name)
        self.dtype = "float32"

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture's name."""
        field = self._reader.get_field(key.replace("{arch}", getattr(self, "_prefix", "")))
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise CheckpointError("the GGUF file lacks a metadata key", got=key.replace("{arch}", self._prefix))
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; lists, one value per layer, are not supported.

        Raises:
            CheckpointError: the key is absent without a default, or holds something else.
        """
        value = self.required(key) if default is None else self.field(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = key.replace("{arch}", self._prefix)
            raise CheckpointError(f"{name} in the GGUF file is not a positive integer", got=repr(value)[:100])
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            CheckpointError: the key is absent without a default, or holds something else.
        """
        value = self.required(key) if default is None else self.field(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            name = key.replace("{arch}", self._prefix)
            raise CheckpointError(f"{name} in the GGUF file is not a positive number", got=repr(value)[:100])
        return float(value)

    def has_source_tensor(self, name: str) -> bool:
        return name in self._tensors

    def read_source(self, name: str) -> Tensor:
        """A tensor under llama.cpp's name, dequantised to float32, [out, in]."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as cause:
            raise CheckpointError(
                f"tensor {name} has a type the gguf package cannot dequantise", got=tensor.tensor_type.name
            ) from cause
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._source_names)

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF lists dimensions fastest first.
        return tuple(int(size) for size in reversed(self._tensors[self._source_names[name]].shape))

    def read(self, name: str) -> Tensor:
        weight = self.read_source(self._source_names[name])
        if ".q_proj." in name:
            return _unpermute(weight, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return _unpermute(weight, self.config["num_key_value_heads"])
        return weight

    def close(self) -> None:
        self._tensors.clear()
        del self._reader

    def _map_names(self, names: Mapping[str, str], path: Path) -> dict[str, str]:
        mapped, unknown = {}, []
        for source in self._tensors:
            layer = re.match(r"blk\.(\d+)\.", source)
            target = names.get(re.sub(r"^blk\.\d+\.", "blk.{}.", source))
            if target is not None:
                mapped[target.format(layer.group(1)) if layer else target] = source
            elif source != ROPE_FACTORS:
                unknown.append(source)
        if unknown:
            raise CheckpointError(f"{path.name} holds tensors Graft does not know", got=", ".join(unknown[:10]))
        return mapped

    def _end_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        ids = [self.field(key) for key in keys]
        return sorted({int(token_id) for token_id in ids if token_id is not None})


def _llama_config(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    num_heads = checkpoint.integer("{arch}.attention.head_count")
    hidden_size = checkpoint.integer("{arch}.embedding_length")
    head_dim = checkpoint.integer("{arch}.attention.key_length", hidden_size // num_heads)
    rotary_dims = checkpoint.integer("{arch}.rope.dimension_count", head_dim)
    if rotary_dims != head_dim:
        raise CheckpointError("partial rotary embedding in a llama GGUF is not supported", got=rotary_dims)
    if checkpoint.field("{arch}.expert_count"):
        raise CheckpointError("mixture-of-experts GGUF files are not supported", got="llama.expert_count")
    return {
        "model_type": "llama",
        "vocab_size": len(checkpoint.required("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": checkpoint.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": checkpoint.integer("{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": checkpoint.integer("{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": checkpoint.number("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": checkpoint.integer("{arch}.context_length"),
        "rope_parameters": _rope_parameters(checkpoint),
        "tie_word_embeddings": not checkpoint.has_source_tensor("output.weight"),
        "attention_bias": checkpoint.has_source_tensor("blk.0.attn_q.bias"),
        "bos_token_id": checkpoint.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": checkpoint.field("tokenizer.ggml.eos_token_id"),
    }


def _rope_parameters(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    theta = checkpoint.number("{arch}.rope.freq_base", 10_000.0)
    if checkpoint.has_source_tensor(ROPE_FACTORS):
        factors = checkpoint.read_source(ROPE_FACTORS).tolist()
        return {"rope_type": "frequency_factors", "rope_theta": theta, "factors": factors}
    scaling = checkpoint.field("{arch}.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": scaling,
        "rope_theta": theta,
        "factor": checkpoint.number("{arch}.rope.scaling.factor"),
    }


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows back from ggml's interleaved rotary layout to transformers' half-split one."""
    head_dim = weight.shape[0] // num_heads
    interleaved = weight.view(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return interleaved.transpose(1, 2).reshape(weight.shape)


ARCHITECTURES: dict[str, _Architecture] = {"llama": _Architecture(names=LLAMA_NAMES, config=_llama_config)}
