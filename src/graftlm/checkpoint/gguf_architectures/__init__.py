"""llama.cpp's architectures in transformers' terms. Adding one is one function that returns a `Translation`, and a row
below.

Sources: `gguf.constants` for llama.cpp's keys and names, its conversion scripts for what they do to the weights,
transformers' configuration and modelling files for the other side.
"""

from __future__ import annotations

from collections.abc import Callable

from graftlm.checkpoint.gguf_architectures.bloom import translate_bloom, translate_gptneox
from graftlm.checkpoint.gguf_architectures.falcon import translate_falcon
from graftlm.checkpoint.gguf_architectures.gemma import translate_gemma, translate_gemma2, translate_gemma3
from graftlm.checkpoint.gguf_architectures.gpt2 import translate_gpt2, translate_starcoder
from graftlm.checkpoint.gguf_architectures.gpt_oss import translate_gpt_oss
from graftlm.checkpoint.gguf_architectures.llama import translate_llama
from graftlm.checkpoint.gguf_architectures.olmo2 import translate_olmo2
from graftlm.checkpoint.gguf_architectures.phi3 import translate_phi3
from graftlm.checkpoint.gguf_architectures.qwen import (
    translate_qwen2,
    translate_qwen2moe,
    translate_qwen3,
    translate_qwen3moe,
)
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile

ARCHITECTURES: dict[str, Callable[[GGUFFile], Translation]] = {
    "bloom": translate_bloom,
    "falcon": translate_falcon,
    "gemma": translate_gemma,
    "gemma2": translate_gemma2,
    "gemma3": translate_gemma3,
    "gpt-oss": translate_gpt_oss,
    "gpt2": translate_gpt2,
    "gptneox": translate_gptneox,
    "llama": translate_llama,
    "olmo2": translate_olmo2,
    "phi3": translate_phi3,
    "qwen2": translate_qwen2,
    "qwen2moe": translate_qwen2moe,
    "qwen3": translate_qwen3,
    "qwen3moe": translate_qwen3moe,
    "starcoder": translate_starcoder,
}
