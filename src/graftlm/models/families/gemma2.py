"""Gemma 2: every other layer looks back a window only, attention scores and logits are capped."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import gemma_like
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import LayerSpec, ModelSpec
from graftlm.models.windows import read_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Gemma 2 config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    attention = gemma_like.read_attention(config, num_heads=8, num_kv_heads=4)
    attention = replace(
        attention,
        scale=gemma_like.read_query_scale(config),
        rope=read_rope(config, attention.head_dim),
        softcap=config.number_or_null("attn_logit_softcapping", 50.0),
    )
    mlp = gemma_like.read_mlp(config)
    norm = gemma_like.read_norm(config)
    num_layers = config.integer("num_hidden_layers", 26)
    window = config.integer_or_null("sliding_window", 4096)
    windows = read_windows(config, window, sliding=[index % 2 == 0 for index in range(num_layers)])
    # The kind of cache transformers 4 kept, and its window once more.
    config.ignore("cache_implementation", "sliding_window_size")
    norms = dict.fromkeys(gemma_like.FOUR_NORMS, norm)
    return gemma_like.read_model(
        config,
        [LayerSpec(attention=replace(attention, window=window), mlp=mlp, norms=norms) for window in windows],
        norm,
        vocab_size=256_000,
        hidden_size=2304,
        max_position_embeddings=8192,
        softcap=config.number_or_null("final_logit_softcapping", 30.0),
    )


GEMMA2 = Family(model_type="gemma2", spec=spec, names=gemma_like.with_default_targets(gemma_like.FOUR_NORM_NAMES))
