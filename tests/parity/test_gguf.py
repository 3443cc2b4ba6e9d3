"""GGUF files against the same weights in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from graftlm import LLM, SamplingParams
from tests.parity.gguf_writer import write_gguf
from tests.parity.oracle import LOUD, Oracle, World, prompt_of
from tests.parity.test_bases import LINEAR_ROPE, LLAMA3_ROPE, adapters_for, shake
from tests.tiny import make_llama

Kind = gguf.GGMLQuantizationType
FILES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "f32": (Kind.F32, {}),
    "f16_tied": (Kind.F16, {"tied": True}),
    "bf16": (Kind.BF16, {}),
    "q8_0": (Kind.Q8_0, {}),
    "q8_0_tied": (Kind.Q8_0, {"tied": True}),
    "q4_0": (Kind.Q4_0, {}),
    "q4_0_tied_multi_head": (Kind.Q4_0, {"tied": True, "num_key_value_heads": 4}),
    "q4_1": (Kind.Q4_1, {}),
    "attention_bias": (Kind.F32, {"attention_bias": True}),
    "wide_heads": (Kind.F32, {"head_dim": 32}),
    "linear_rope": (Kind.F32, {"rope_parameters": LINEAR_ROPE}),
    "llama3_rope": (Kind.F32, {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.mark.parametrize(("kind", "config"), FILES.values(), ids=FILES)
def test_a_gguf_file_serves_base_and_peft_adapters_as_its_dequantised_weights_do(
    kind: Kind, config: dict[str, Any], tmp_path: Path
) -> None:
    base = shake(make_llama(tmp_path / "base", vocab_size=260, **config))
    exact = Oracle(base).logits(prompt_of(20, 1))
    adapters = adapters_for(base, tmp_path)
    path = write_gguf(base, tmp_path / "model.gguf", kind)
    rounded = Oracle(base)
    assert ((rounded.logits(prompt_of(20, 1)) - exact).abs().max() > LOUD) == (kind not in (Kind.F32, Kind.F16))
    llm = LLM(path, kv_cache_bytes=16 << 20)
    World(base=base, llm=llm, oracle=rounded).assert_parity(adapters, max_tokens=16 if kind == Kind.F32 else 32)


def test_text_goes_through_the_tokenizer_inside_the_gguf_file(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", vocab_size=260)
    llm = LLM(write_gguf(base, tmp_path / "model.gguf", Kind.F32), kv_cache_bytes=1 << 20)
    folder = LLM(base, kv_cache_bytes=1 << 20)
    greedy = SamplingParams(max_tokens=8, temperature=0)
    text = "zwölf Boxkämpfer"
    [ours], [theirs] = llm.generate(text, greedy), folder.generate(text, greedy)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.outputs[0].text == theirs.outputs[0].text
