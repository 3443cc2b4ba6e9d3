"""SmolLM3: Llama with layers that know no positions, which may have a window."""

from __future__ import annotations

from dataclasses import replace

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ModelSpec, NormSpec
from graftlm.models.windows import read_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a SmolLM3 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    num_layers = config.integer("num_hidden_layers")
    has_rope = _read_has_rope(config, num_layers)
    window = config.integer_or_null("sliding_window", None)
    window = window if config.flag("use_sliding_window") else None
    windows = read_windows(config, window, sliding=[window is not None and not rotates for rotates in has_rope])
    config.ignore("max_window_layers")
    biased = config.flag("attention_bias")
    attention = llama_like.read_attention(config, qkv_bias=biased, output_bias=biased, rope_theta=2_000_000.0)
    mlp = llama_like.read_mlp(config, bias=config.flag("mlp_bias"))
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    layers = [
        llama_like.pre_norm_layer(
            replace(attention, window=window, rope=attention.rope if rotates else None), mlp, norm
        )
        for window, rotates in zip(windows, has_rope, strict=True)
    ]
    return llama_like.read_model(config, layers, norm, max_position_embeddings=32768, tied_head=True)


def _read_has_rope(config: ConfigReader, num_layers: int) -> list[bool]:
    """Of each layer. `no_rope_layers` has a 0 for a layer without rotary positions, in spite of its name."""
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers", [int((index + 1) % interval != 0) for index in range(num_layers)])
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(
            "config.json: no_rope_layers is not supported",
            got=repr(flags)[:100],
            allowed=f"a 0 or 1 for each of the {num_layers} layers",
        )
    return [bool(flag) for flag in flags[:num_layers]]


SMOLLM3 = Family(model_type="smollm3", spec=spec, names=llama_like.NAMES)
