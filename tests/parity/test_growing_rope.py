"""Rotary positions that depend on the length, against transformers' generate, one sequence at a time.

A sequence that grows beyond its original context changes its frequencies: token by token (dynamic), or all at once,
which computes it anew (longrope).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from graftlm import LLM, SamplingParams
from tests.parity.family_cases import SMALL
from tests.parity.oracle import LOUD, Oracle, assert_close, count_ties, greedy, make_even_adapter, prompt_of
from tests.tiny import make_model

CONTEXT = 32
# Stays within the original context; grows beyond it at once, after one token, after a few; is beyond from the start.
LENGTHS = (1, 32, 31, 27, 33, 60)
MAX_TOKENS = 20
# Two layers of two heads of 16, keys and values in float32.
KV_BYTES_PER_TOKEN = 512
SETTINGS = {**SMALL, "pad_token_id": 258}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [3.0 + 2.0 * pair for pair in range(8)],
}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "dynamic": transformers.LlamaConfig(**{**SETTINGS, "max_position_embeddings": CONTEXT, "rope_parameters": DYNAMIC}),
    "longrope": transformers.Phi3Config(
        **{
            **SETTINGS,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": LONGROPE,
        }
    ),
}
TARGETS = {"dynamic": ["q_proj", "k_proj", "down_proj"], "longrope": ["qkv_proj", "gate_up_proj"]}


class Grown:
    """A base with an adapter, and what transformers and PEFT generate with them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.base = make_model(folder / "base", CONFIGS[name])
        self.adapter = make_even_adapter(self.base, folder / "adapter", target_modules=TARGETS[name])
        self.prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]

    def llm(self, **options: Any) -> LLM:
        return LLM(self.base, adapters={"tuned": self.adapter}, **{"kv_cache_bytes": 1 << 20, **options})

    def expected(self, prompt: Sequence[int], adapter: str | None) -> Tensor:
        """Logits before each generated token, [MAX_TOKENS, V]. A fresh model: it remembers the longest sequence."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32, attn_implementation="eager")
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, self.adapter)
        generated = model.eval().generate(
            input_ids=torch.tensor([list(prompt)]),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat(generated.logits)

    def judge(self, answers: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> None:
        rows = zip(self.prompts, answers, adapters, strict=True)
        ties = sum(count_ties(self.expected(prompt, adapter), answer) for prompt, answer, adapter in rows)
        assert ties <= 1


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grown:
    return Grown(tmp_path_factory.mktemp("grown"), request.param)


@pytest.fixture(scope="module")
def llm(grown: Grown) -> Iterator[LLM]:
    llm = grown.llm()
    yield llm
    llm.shutdown()


def test_sequences_on_both_sides_of_the_original_context_in_one_batch(grown: Grown, llm: LLM) -> None:
    adapters = [None, "tuned", None, "tuned", None, "tuned"]
    grown.judge(greedy(llm, list(zip(adapters, grown.prompts, strict=True)), MAX_TOKENS), adapters)


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 7}, {"kv_cache_bytes": 128 * KV_BYTES_PER_TOKEN}],
    ids=["prompts_in_chunks", "preemption"],
)
def test_growing_beyond_the_original_context_does_not_depend_on_the_schedule(
    options: dict[str, Any], grown: Grown
) -> None:
    llm = grown.llm(**options)
    adapters = ["tuned", None, "tuned", None, "tuned", None]
    grown.judge(greedy(llm, list(zip(adapters, grown.prompts, strict=True)), MAX_TOKENS), adapters)
    llm.shutdown()


def test_a_cached_beginning_is_not_used_by_a_sequence_that_is_computed_otherwise(grown: Grown, llm: LLM) -> None:
    whole = prompt_of(90, 7)
    for length in (20, 33, 60, 45, 20, 60):
        prompt = whole[:length]
        answer = greedy(llm, [(None, prompt)], MAX_TOKENS)[0]
        assert count_ties(grown.expected(prompt, None), answer) == 0


def test_logits_of_a_whole_sequence_are_those_of_one_forward_pass(grown: Grown, llm: LLM) -> None:
    for length in (5, CONTEXT, CONTEXT + 1, 100):
        # A new oracle each time: transformers' dynamic frequencies remember the longest sequence.
        token_ids = prompt_of(length, length)
        assert_close(llm.logits(token_ids), Oracle(grown.base).logits(token_ids))


def test_the_scaling_is_loud_enough_to_be_tested(grown: Grown, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(grown.base)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    plain = make_model(tmp_path, config)
    long = prompt_of(60, 1)
    assert (Oracle(plain).logits(long) - Oracle(grown.base).logits(long)).abs().max() > LOUD


def test_prompt_logprobs_are_given_once_when_the_sequence_is_computed_anew(grown: Grown, llm: LLM) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, prompt_logprobs=0)
    prompt = grown.prompts[3]
    output = llm.generate([{"prompt_token_ids": list(prompt)}], params)[0]
    expected = Oracle(grown.base).logits(prompt).log_softmax(dim=-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, described in enumerate(output.prompt_logprobs[1:], 1):
        assert described.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-4)
