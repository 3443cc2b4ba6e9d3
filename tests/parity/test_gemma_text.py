"""Gemma's tokenizers and turns: vocabularies of full size, one BOS, an answer that ends where its turn does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftlm import LLM, SamplingParams
from graftlm.errors import InvalidRequest
from tests.parity.family_cases import GEMMA, SPLIT_PROJECTIONS
from tests.parity.oracle import LOUD, Oracle, assert_close, count_ties, greedy, make_even_adapter
from tests.text.tokenizers import GEMMA_SPECIAL, write_gemma_tokenizer
from tests.tiny import edit_json

EOS, BOS, END_OF_TURN = (GEMMA_SPECIAL.index(token) for token in ("<eos>", "<bos>", "<end_of_turn>"))
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "  bold gems \n"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "na\u00efve words"},
]


def make_chat_gemma(folder: Path, config_class: str, vocab_size: int, **settings: Any) -> Path:
    """A tiny Gemma with a Gemma tokenizer of the same size."""
    torch.manual_seed(0)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
    config = getattr(transformers, config_class)(**{**GEMMA, **ids, "vocab_size": vocab_size, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_gemma_tokenizer(folder, vocab_size)
    return folder


@pytest.mark.parametrize(("config_class", "vocab_size"), [("GemmaConfig", 256_000), ("Gemma3TextConfig", 262_144)])
def test_a_vocabulary_of_full_size_is_adapted_at_both_ends_as_by_peft(
    config_class: str, vocab_size: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 12, "intermediate_size": 16, "head_dim": 4, "num_hidden_layers": 1}
    base = make_chat_gemma(tmp_path / "base", config_class, vocab_size, **sizes)
    everything = [*SPLIT_PROJECTIONS, "embed_tokens", "lm_head"]
    adapter = make_even_adapter(base, tmp_path / "a", target_modules=everything, r=2, ensure_weight_tying=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert len(tokenizer) == vocab_size
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert max(prompt) > 10_000
    llm, oracle = LLM(base, kv_cache_bytes=1 << 20, adapters={"a": adapter}), Oracle(base)
    texts = llm.chat([MESSAGES] * 2, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), adapter=[None, "a"])
    answers = greedy(llm, [(None, prompt), ("a", prompt)], 4)
    for name, path, answer, text in zip((None, "a"), (None, adapter), answers, texts, strict=True):
        assert list(text.prompt_token_ids) == prompt
        assert text.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)
        expected = oracle.logits([*prompt, *answer], path)
        assert_close(llm.logits([*prompt, *answer], adapter=name), expected)
        assert count_ties(expected[len(prompt) - 1 : -1], answer) == 0
    assert (oracle.logits(prompt, adapter) - oracle.logits(prompt)).abs().max() > LOUD


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma that soon ends its turn; its generation config lists two ids to stop at."""
    base = make_chat_gemma(tmp_path_factory.mktemp("talker"), "Gemma2Config", 512, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    prompt = AutoTokenizer.from_pretrained(base).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    with torch.no_grad():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None)
        *_, before, last = model.model(whole).last_hidden_state[0]
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"][END_OF_TURN] = last - before
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    edit_json(base / "generation_config.json", eos_token_id=[EOS, END_OF_TURN])
    return base


def test_an_answer_stops_at_the_end_of_the_turn_as_in_transformers(talker: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(talker)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(talker, attn_implementation="eager")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    assert expected[-1] == END_OF_TURN
    assert len(expected) > 1
    output = LLM(talker, kv_cache_bytes=1 << 20).chat(MESSAGES, SamplingParams(max_tokens=40, temperature=0))[0]
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert list(answer.token_ids) == expected
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_r025_a_chat_has_the_templates_bos_and_a_prompt_the_tokenizers(talker: Path) -> None:
    llm = LLM(talker, kv_cache_bytes=1 << 20)
    params = SamplingParams(max_tokens=1)
    chat, prompt = llm.chat(MESSAGES, params)[0], llm.generate(["hello gemma"], params)[0]
    for ids in (chat.prompt_token_ids, prompt.prompt_token_ids):
        assert ids[0] == BOS
        assert list(ids).count(BOS) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "Be brief."}, *MESSAGES], "System role not supported"),
        ([MESSAGES[0], MESSAGES[0]], "Conversation roles must alternate"),
        ([MESSAGES[1]], "Conversation roles must alternate"),
    ],
    ids=["system", "two_users", "assistant_first"],
)
def test_r074_a_gemma_template_refuses_in_its_own_words(
    messages: list[dict[str, Any]], words: str, talker: Path
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        LLM(talker, kv_cache_bytes=1 << 20).chat(messages)
    assert refused.value.param == "messages"
