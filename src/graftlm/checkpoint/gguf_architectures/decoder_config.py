"""The config keys that most architectures share."""

from __future__ import annotations

from typing import Any

from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError

# Per-frequency divisors of the rotary embedding (Llama 3): part of the config here, not a weight.
ROPE_FACTORS = "rope_freqs.weight"


def vocabulary_config(file: GGUFFile) -> dict[str, Any]:
    """Vocabulary, special tokens, and whether the head is the embedding: it is when no tensor says otherwise."""
    return {
        "vocab_size": len(file.required("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in file.tensor_names(),
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.field("tokenizer.ggml.padding_token_id"),
    }


def decoder_config(file: GGUFFile) -> dict[str, Any]:
    """Sizes under the names of Llama and its relatives."""
    num_heads = file.integer("{arch}.attention.head_count")
    return {
        **vocabulary_config(file),
        "hidden_size": file.integer("{arch}.embedding_length"),
        "intermediate_size": file.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": file.integer("{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer("{arch}.attention.head_count_kv", num_heads),
        "rms_norm_eps": file.number("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.integer("{arch}.context_length"),
    }


def head_dim(file: GGUFFile) -> int:
    """Width of a head: its own key, or else an equal share of the hidden size."""
    share = file.integer("{arch}.embedding_length") // file.integer("{arch}.attention.head_count")
    return file.integer("{arch}.attention.key_length", share)


def whole_rotary_head_dim(file: GGUFFile) -> int:
    """Width of a head all of which is rotated.

    Raises:
        CheckpointError: only a part of it is.
    """
    width = head_dim(file)
    rotary_dims = file.integer("{arch}.rope.dimension_count", width)
    if rotary_dims != width:
        raise CheckpointError(
            f"partial rotary embedding in a {file.architecture} GGUF is not supported", got=rotary_dims
        )
    return width


def rope_parameters(file: GGUFFile) -> dict[str, Any]:
    """config.json's `rope_parameters`; "frequency_factors" is a type of ours, for what GGUF stores of Llama 3's."""
    theta = file.number("{arch}.rope.freq_base", 10_000.0)
    if ROPE_FACTORS in file.tensor_names():
        return {"rope_type": "frequency_factors", "rope_theta": theta, "factors": file.read(ROPE_FACTORS).tolist()}
    scaling = file.field("{arch}.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": scaling, "rope_theta": theta, "factor": file.number("{arch}.rope.scaling.factor")}
