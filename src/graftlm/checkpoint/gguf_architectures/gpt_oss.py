"""GPT-OSS. llama.cpp keeps apart the gate and up rows that transformers alternates, and turns experts to [out, in]."""

from __future__ import annotations

from graftlm.checkpoint.gguf_architectures.decoder_config import decoder_config, rope_parameters, whole_rotary_head_dim
from graftlm.checkpoint.gguf_architectures.llama import ATTENTION_MODULES, LAYER, MODULES
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile


def translate_gpt_oss(file: GGUFFile) -> Translation:
    rope = rope_parameters(file)
    if rope["rope_type"] == "yarn":
        # The file tells neither of these; the published models have them.
        rope |= {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": file.integer("{arch}.rope.scaling.original_context_length"),
        }
    config = {
        **decoder_config(file),
        "model_type": "gpt_oss",
        "head_dim": whole_rotary_head_dim(file),
        "intermediate_size": file.integer("{arch}.expert_feed_forward_length"),
        "num_local_experts": file.integer("{arch}.expert_count"),
        "num_experts_per_tok": file.integer("{arch}.expert_used_count"),
        "sliding_window": file.integer("{arch}.attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names(),
        "rope_parameters": rope,
    }
    return Translation(
        config=config,
        modules=MODULES,
        layer=LAYER,
        layer_modules={
            **ATTENTION_MODULES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        stacks={"ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_down_exps": "mlp.experts.down_proj"},
        alternating={"ffn_gate_exps": "ffn_up_exps"},
        parameters={"attn_sinks.weight": "self_attn.sinks"},
        transposed=frozenset({"ffn_gate_exps", "ffn_down_exps"}),
    )
