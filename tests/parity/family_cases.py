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
SMALL_MOE = {**SMALL, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
SMALL_GPT = {
    **VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.12,
}
SMALL_OPT = {
    **VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "init_std": 0.12,
}
# What older families, whose widths are multiples of each other, are told.
PLAIN = {key: SMALL[key] for key in (*VOCABULARY, "hidden_size", "initializer_range")}
NEOX_PROJECTIONS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
PHI_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOE_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
GPT_OSS_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight")
SPLIT_PROJECTIONS = (*ATTENTION_PROJECTIONS, "gate_proj", "up_proj", "down_proj")
FUSED_PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GPT_PROJECTIONS = ("c_attn", "c_proj", "c_fc")
OPT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
# Loud enough for soft caps to bend scores and logits; a window that prompts and answers cross; heads wider than their
# share of the hidden size, whose root is no bfloat16 number.
GEMMA = {**SMALL, "hidden_size": 60, "head_dim": 24, "tie_word_embeddings": True}
WINDOWED_GEMMA = {**GEMMA, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 20}
CAPPED_GEMMA = {**WINDOWED_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
GEMMA3 = {
    **WINDOWED_GEMMA,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA4 = {
    **GEMMA,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 259,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA4_PROJECTIONS = (
    *SPLIT_PROJECTIONS,
    "per_layer_input_gate",
    "per_layer_projection",
    "per_layer_model_projection",
)
GEMMA4_MOE = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
GEMMA4_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight")
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A config class of transformers with settings, and its linear modules as PEFT targets them.

    parameters: what `target_parameters` can name. embedding, head: names of the two ends.
    attention: transformers' implementation that is the reference.
    """

    config_class: str
    settings: Mapping[str, Any]
    targets: tuple[str, ...] = SPLIT_PROJECTIONS
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    attention: str = "eager"
    parameters: tuple[str, ...] = ()
    adapter_settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> transformers.PreTrainedConfig:
        config: transformers.PreTrainedConfig = getattr(transformers, self.config_class)(**self.settings)
        return config

    def adapters(self) -> dict[str, dict[str, Any]]:
        """Settings of the LoRA adapters that every family is tried with."""
        kinds: dict[str, dict[str, Any]] = {
            "lora": {"target_modules": [*self.targets, self.embedding, self.head], "ensure_weight_tying": False},
            "dora": {"target_modules": list(self.targets), "use_dora": True},
            "saved_head": {"target_modules": list(self.targets[:1]), "modules_to_save": [self.head]},
        }
        if self.parameters:
            kinds["parameters"] = {"target_modules": [], "target_parameters": list(self.parameters)}
        return {kind: {**settings, **self.adapter_settings} for kind, settings in kinds.items()}


def bloom(**settings: Any) -> FamilyCase:
    return FamilyCase(
        config_class="BloomConfig",
        settings={**PLAIN, "n_layer": 2, "n_head": 4, **settings},
        targets=NEOX_PROJECTIONS,
        embedding="word_embeddings",
    )


def falcon(**settings: Any) -> FamilyCase:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return FamilyCase(
        config_class="FalconConfig",
        settings={**PLAIN, **layers, **settings},
        targets=NEOX_PROJECTIONS,
        embedding="word_embeddings",
        # transformers' eager attention adds ALiBi's bias twice, its default once, as the authors' code does.
        attention="sdpa",
    )


def gpt_neox(**settings: Any) -> FamilyCase:
    kept = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return FamilyCase(
        config_class="GPTNeoXConfig",
        settings={**kept, **settings},
        targets=NEOX_PROJECTIONS,
        embedding="embed_in",
    )


def phi(**settings: Any) -> FamilyCase:
    return FamilyCase(config_class="PhiConfig", settings={**SMALL, **settings}, targets=PHI_PROJECTIONS)


FAMILY_CASES: dict[str, FamilyCase] = {
    "llama": FamilyCase(config_class="LlamaConfig", settings=SMALL),
    "llama_tied": FamilyCase(config_class="LlamaConfig", settings={**SMALL, "tie_word_embeddings": True}),
    "llama_biases": FamilyCase(
        config_class="LlamaConfig", settings={**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 24}
    ),
    "gpt2": FamilyCase(config_class="GPT2Config", settings=SMALL_GPT, targets=GPT_PROJECTIONS, embedding="wte"),
    "gpt2_untied": FamilyCase(
        config_class="GPT2Config",
        settings={
            **SMALL_GPT,
            "n_inner": 96,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "gelu_fast",
        },
        targets=GPT_PROJECTIONS,
        embedding="wte",
    ),
    "gpt2_unscaled": FamilyCase(
        config_class="GPT2Config",
        settings={
            **SMALL_GPT,
            "initializer_range": 0.08,
            "scale_attn_weights": False,
            "reorder_and_upcast_attn": True,
            "activation_function": "gelu_python",
            "layer_norm_epsilon": 1e-2,
        },
        targets=GPT_PROJECTIONS,
        embedding="wte",
    ),
    "gpt_bigcode": FamilyCase(
        config_class="GPTBigCodeConfig", settings=SMALL_GPT, targets=GPT_PROJECTIONS, embedding="wte"
    ),
    "gpt_bigcode_multi_head": FamilyCase(
        config_class="GPTBigCodeConfig",
        settings={**SMALL_GPT, "multi_query": False, "n_inner": 96, "tie_word_embeddings": False},
        targets=GPT_PROJECTIONS,
        embedding="wte",
    ),
    "opt": FamilyCase(config_class="OPTConfig", settings=SMALL_OPT, targets=OPT_PROJECTIONS),
    "opt_post_norm": FamilyCase(
        config_class="OPTConfig",
        settings={**SMALL_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        targets=(*OPT_PROJECTIONS, "project_in", "project_out"),
    ),
    "opt_bare": FamilyCase(
        config_class="OPTConfig",
        settings={
            **SMALL_OPT,
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
        targets=OPT_PROJECTIONS,
    ),
    "bloom": bloom(),
    "bloom_untied": bloom(tie_word_embeddings=False),
    "bloom_normed_residual": bloom(apply_residual_connection_post_layernorm=True),
    "bloom_odd_heads": bloom(hidden_size=66, n_head=6),
    "falcon_7b": falcon(hidden_size=60, num_attention_heads=6, num_kv_heads=6),
    "falcon_7b_biases": falcon(bias=True, ffn_hidden_size=100, tie_word_embeddings=False),
    "falcon_40b": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon_11b": falcon(new_decoder_architecture=True, num_kv_heads=1, num_ln_in_parallel_attn=1),
    "falcon_rw": falcon(
        multi_query=False, parallel_attn=False, alibi=True, bias=True, hidden_size=60, num_attention_heads=6
    ),
    "falcon_groups_alibi": falcon(new_decoder_architecture=True, num_kv_heads=2, alibi=True),
    "gpt_neox": gpt_neox(),
    "gpt_neox_sequential": gpt_neox(use_parallel_residual=False, tie_word_embeddings=True, hidden_act="gelu_fast"),
    "gpt_neox_no_biases": gpt_neox(
        attention_bias=False,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 500.0},
    ),
    "phi": phi(),
    "phi_qk_norm": phi(qk_layernorm=True, tie_word_embeddings=True),
    "phi_2": phi(num_key_value_heads=4, rope_parameters={"partial_rotary_factor": 0.375}),
    "mistral": FamilyCase(config_class="MistralConfig", settings={**SMALL, "sliding_window": None, "head_dim": 24}),
    "mistral_window": FamilyCase(config_class="MistralConfig", settings={**SMALL, "sliding_window": 24}),
    "qwen2": FamilyCase(config_class="Qwen2Config", settings={**SMALL, "tie_word_embeddings": True}),
    "qwen2_window": FamilyCase(
        config_class="Qwen2Config",
        settings={**SMALL, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": FamilyCase(config_class="Qwen3Config", settings={**SMALL, "head_dim": 24}),
    "qwen3_biases_window": FamilyCase(
        config_class="Qwen3Config",
        settings={
            **SMALL,
            "attention_bias": True,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": FamilyCase(config_class="Phi3Config", settings=SMALL, targets=FUSED_PROJECTIONS),
    "phi3_window_partial": FamilyCase(
        config_class="Phi3Config",
        settings={
            **SMALL,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
        targets=FUSED_PROJECTIONS,
    ),
    # The shorter prompts stay within the original context, the longer ones begin beyond it.
    "phi3_longrope": FamilyCase(
        config_class="Phi3Config",
        settings={
            **SMALL,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
            },
        },
        targets=FUSED_PROJECTIONS,
    ),
    "olmo2": FamilyCase(config_class="Olmo2Config", settings=SMALL),
    "olmo2_biases": FamilyCase(config_class="Olmo2Config", settings={**SMALL, "attention_bias": True}),
    "smollm3": FamilyCase(config_class="SmolLM3Config", settings={**SMALL, "no_rope_layer_interval": 2}),
    "smollm3_window": FamilyCase(
        config_class="SmolLM3Config",
        settings={
            **SMALL,
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": FamilyCase(
        config_class="MixtralConfig",
        settings={**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
        targets=ATTENTION_PROJECTIONS,
        parameters=MOE_PARAMETERS,
    ),
    "mixtral_window": FamilyCase(
        config_class="MixtralConfig",
        settings={
            **SMALL,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
        targets=ATTENTION_PROJECTIONS,
        parameters=MOE_PARAMETERS,
    ),
    "qwen2_moe": FamilyCase(
        config_class="Qwen2MoeConfig",
        settings={**SMALL_MOE, "num_experts": 8, "shared_expert_intermediate_size": 40},
        targets=(*SPLIT_PROJECTIONS, "shared_expert_gate"),
        parameters=MOE_PARAMETERS,
    ),
    "qwen2_moe_dense_layers": FamilyCase(
        config_class="Qwen2MoeConfig",
        settings={
            **SMALL_MOE,
            "num_experts": 5,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
        targets=SPLIT_PROJECTIONS,
        parameters=MOE_PARAMETERS,
    ),
    "qwen3_moe": FamilyCase(
        config_class="Qwen3MoeConfig",
        settings={**SMALL_MOE, "num_experts": 8, "norm_topk_prob": True},
        targets=ATTENTION_PROJECTIONS,
        parameters=MOE_PARAMETERS,
    ),
    "gpt_oss": FamilyCase(
        config_class="GptOssConfig",
        settings={
            **SMALL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 24,
            # Low enough for the clamp to matter.
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        targets=ATTENTION_PROJECTIONS,
        parameters=GPT_OSS_PARAMETERS,
    ),
    "gpt_oss_yarn": FamilyCase(
        config_class="GptOssConfig",
        settings={
            **SMALL,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 24,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        targets=ATTENTION_PROJECTIONS,
        parameters=GPT_OSS_PARAMETERS,
    ),
    "qwen3_moe_dense_layers": FamilyCase(
        config_class="Qwen3MoeConfig",
        settings={
            **SMALL_MOE,
            "num_experts": 4,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
        targets=ATTENTION_PROJECTIONS,
        parameters=MOE_PARAMETERS,
    ),
    "gemma": FamilyCase(config_class="GemmaConfig", settings=GEMMA),
    "gemma_multi_query_untied": FamilyCase(
        config_class="GemmaConfig",
        settings={**GEMMA, "num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma2": FamilyCase(config_class="Gemma2Config", settings=CAPPED_GEMMA),
    "gemma2_without_caps": FamilyCase(
        config_class="Gemma2Config",
        settings={**CAPPED_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": FamilyCase(config_class="Gemma3TextConfig", settings=GEMMA3),
    "gemma3_text_capped": FamilyCase(
        config_class="Gemma3TextConfig", settings={**GEMMA3, "final_logit_softcapping": 2.0}
    ),
    "gemma4_text": FamilyCase(config_class="Gemma4TextConfig", settings=GEMMA4, targets=GEMMA4_PROJECTIONS),
    "gemma4_text_plain": FamilyCase(
        config_class="Gemma4TextConfig",
        settings={
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_moe": FamilyCase(
        config_class="Gemma4TextConfig",
        settings=GEMMA4_MOE,
        targets=(*GEMMA4_PROJECTIONS, "router.proj"),
        parameters=GEMMA4_PARAMETERS,
    ),
    "gemma4": FamilyCase(
        config_class="Gemma4Config",
        settings={"text_config": GEMMA4, "vision_config": GEMMA4_VISION, "audio_config": None},
        targets=GEMMA4_PROJECTIONS,
        adapter_settings={"exclude_modules": r".*vision_tower.*"},
    ),
    "gemma3": FamilyCase(
        config_class="Gemma3Config",
        settings={"text_config": GEMMA3, "vision_config": TINY_VISION, "mm_tokens_per_image": 4},
    ),
}
