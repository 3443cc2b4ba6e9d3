"""Tiny configs of every family, with whatever makes its members differ. A new family is a new entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

# One row per token of the byte-level tokenizer.
VOCABULARY = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
SMALL = {
    **VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
SPLIT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A config class of transformers with settings, and its linear modules as PEFT targets them.

    embedding, head: names of the two ends. dora: whether PEFT can do DoRA on all targets.
    """

    config_class: str
    settings: Mapping[str, Any]
    targets: tuple[str, ...] = SPLIT_PROJECTIONS
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    adapter_settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> transformers.PreTrainedConfig:
        config: transformers.PreTrainedConfig = getattr(transformers, self.config_class)(**self.settings)
        return config


FAMILY_CASES: dict[str, FamilyCase] = {
    "llama": FamilyCase(config_class="LlamaConfig", settings=SMALL),
    "llama_tied": FamilyCase(config_class="LlamaConfig", settings={**SMALL, "tie_word_embeddings": True}),
    "llama_biases": FamilyCase(
        config_class="LlamaConfig", settings={**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 24}
    ),
}
