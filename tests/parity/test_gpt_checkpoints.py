"""GPT-2, GPTBigCode and OPT as they lie on disk: old names, tied and untied heads, padded vocabularies, bad configs."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm import LLM, merge
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import AdapterIncompatible, CheckpointError
from graftlm.models.read import read_spec
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter, make_world, prompt_of
from tests.tiny import edit_json, make_model

GPT = ["c_attn", "c_proj", "c_fc"]
PROMPT = prompt_of(40, 3)
STARCODER_VOCABULARY = 49_152
PADDING = 256


def make_base(name: str, folder: Path, **settings: Any) -> Path:
    case = FAMILY_CASES[name]
    config = case.config()
    for key, value in settings.items():
        setattr(config, key, value)
    return make_model(folder, config)


def rewrite(base: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = base / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def as_gpt2_lay_on_the_hub(base: Path) -> None:
    mask = torch.ones(512, 512).tril()[None, None]
    buffers = {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}
    buffers |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    rewrite(base, lambda tensors: without_prefix(tensors, "transformer.") | buffers)
    edit_json(base / "config.json", tie_word_embeddings=..., dtype=..., torch_dtype="float32", n_ctx=512, n_inner=None)


def as_old_gpt_bigcode(base: Path) -> None:
    rewrite(base, lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()})
    edit_json(base / "config.json", tie_word_embeddings=..., multi_query=..., inference_runner=0, pad_key_length=True)


def as_opt_lay_on_the_hub(base: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.decoder.embed_tokens.weight"].clone()
        return {**without_prefix(tensors, "model."), "lm_head.weight": head}

    rewrite(base, change)
    edit_json(base / "config.json", tie_word_embeddings=..., dtype=..., torch_dtype="float32", activation_dropout=0.0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", as_gpt2_lay_on_the_hub),
        ("gpt_bigcode", as_old_gpt_bigcode),
        ("opt", as_opt_lay_on_the_hub),
        ("opt_post_norm", as_opt_lay_on_the_hub),
    ],
)
def test_files_of_old_releases_are_read_as_transformers_reads_them(
    name: str, change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(name, tmp_path / "base")
    expected = Oracle(base).logits(PROMPT)
    change(base)
    assert_close(Oracle(base).logits(PROMPT), expected)
    with caplog.at_level(logging.WARNING):
        assert_close(LLM(base).logits(PROMPT), expected)
    assert [record for record in caplog.records if record.name.startswith("graftlm")] == []


@pytest.mark.parametrize("name", [name for name in FAMILY_CASES if name.startswith(("gpt", "opt"))])
def test_a_config_as_transformers_writes_it_has_no_key_that_nothing_reads(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FAMILY_CASES[name].config().save_pretrained(tmp_path)
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        read_spec(open_checkpoint(tmp_path))
    assert not caplog.records


def test_an_untied_head_that_differs_gives_other_answers_than_the_tied_one(tmp_path: Path) -> None:
    untied = make_base("gpt_bigcode", tmp_path / "untied", tie_word_embeddings=False)
    contradicting = shutil.copytree(untied, tmp_path / "contradicting")
    edit_json(contradicting / "config.json", tie_word_embeddings=True)
    tied = shutil.copytree(contradicting, tmp_path / "tied")
    rewrite(tied, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    answers = {}
    for base in (untied, contradicting, tied):
        world = make_world(base)
        adapter = make_even_adapter(base, tmp_path / f"{base.name}-adapter", target_modules=[*GPT, "lm_head"])
        world.assert_parity({"everything": adapter}, max_tokens=4)
        answers[base.name] = world.llm.logits(PROMPT)
    assert torch.equal(answers["untied"], answers["contradicting"])
    assert (answers["untied"] - answers["tied"]).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_r018_a_saved_head_or_embedding_counts_for_its_own_requests(tmp_path: Path) -> None:
    world = make_world(make_base("gpt_bigcode", tmp_path / "base"))
    before = world.llm.logits(PROMPT)
    saved = {"head": ["lm_head"], "embedding": ["wte"], "ends": ["wte", "lm_head"]}
    world.assert_parity(
        {
            name: make_even_adapter(world.base, tmp_path / name, target_modules=["c_attn"], modules_to_save=modules)
            for name, modules in saved.items()
        },
        max_tokens=8,
    )
    assert torch.equal(world.llm.logits(PROMPT), before)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    ("name", "change", "target"),
    [
        ("gpt2", as_gpt2_lay_on_the_hub, "c_proj"),
        ("gpt_bigcode", as_old_gpt_bigcode, "c_proj"),
        ("opt_post_norm", as_opt_lay_on_the_hub, "fc1"),
    ],
)
def test_r019_a_head_merged_apart_from_its_embedding_is_written_untied(
    name: str, change: Callable[[Path], None], target: str, tmp_path: Path
) -> None:
    base, merged = make_base(name, tmp_path / "base"), tmp_path / "merged"
    change(base)
    adapter = make_even_adapter(base, tmp_path / "adapter", target_modules=[target, "lm_head"], bias="all")
    merge(base, adapter, merged)
    expected = Oracle(base).logits(PROMPT, adapter)
    assert (expected - Oracle(base).logits(PROMPT)).abs().max() > LOUD
    assert_close(Oracle(merged).logits(PROMPT), expected)
    assert_close(LLM(merged).logits(PROMPT), expected)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("padding", [0, PADDING])
def test_a_vocabulary_of_49152_with_and_without_padding_rows_is_served_to_its_last_row(
    padding: int, tmp_path: Path
) -> None:
    size = STARCODER_VOCABULARY + padding
    world = make_world(make_base("gpt_bigcode", tmp_path / "base", vocab_size=size, n_layer=1, n_embd=32))
    assert world.llm.logits(PROMPT).shape == (len(PROMPT), size)
    assert_close(world.llm.logits([size - 1, 5]), world.oracle.logits([size - 1, 5]))
    world.assert_parity(
        {
            "everything": make_even_adapter(world.base, tmp_path / "all", target_modules=[*GPT, "lm_head"]),
            "tokens": make_even_adapter(
                world.base, tmp_path / "tokens", target_modules=GPT, trainable_token_indices=[size - 1, 5]
            ),
        },
        max_tokens=2,
    )


def test_an_adapter_of_the_unpadded_head_does_not_fit_the_padded_one(tmp_path: Path) -> None:
    unpadded = make_base("gpt_bigcode", tmp_path / "unpadded", vocab_size=300)
    padded = make_base("gpt_bigcode", tmp_path / "padded", vocab_size=300 + PADDING)
    head = make_even_adapter(unpadded, tmp_path / "head", target_modules=[*GPT, "lm_head"])
    body = make_even_adapter(unpadded, tmp_path / "body", target_modules=GPT)
    world = make_world(padded)
    with pytest.raises(AdapterIncompatible, match="lm_head has another shape"):
        world.llm.load_adapter("head", head)
    world.assert_parity({"body": body}, max_tokens=8)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2_heads": ("gpt2", {"n_head": 5}, "n_embd is not a multiple of n_head; got: 64, 5"),
    "gpt2_no_heads": ("gpt2", {"n_head": 0}, "n_head is not a positive integer"),
    "gpt2_activation": ("gpt2", {"activation_function": "mish"}, "activation_function is not supported; got: 'mish'"),
    "gpt2_cross_attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention is not supported"),
    "gpt2_flag": ("gpt2", {"scale_attn_by_inverse_layer_idx": "yes"}, "scale_attn_by_inverse_layer_idx is not true"),
    "gpt2_positions": ("gpt2", {"n_positions": 256}, r"misshapen: transformer\.wpe\.weight \[512, 64\]"),
    "gpt2_inner": ("gpt2", {"n_inner": 128}, r"misshapen: .*c_fc\.weight \[64, 256\] instead of \[64, 128\]"),
    "bigcode_heads": ("gpt_bigcode", {"n_head": 5}, "n_embd is not a multiple of n_head"),
    "bigcode_layout": ("gpt_bigcode", {"multi_query": False}, r"misshapen: .*c_attn\.bias \[96\] instead of \[192\]"),
    "bigcode_cross_attention": ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is not supported"),
    "opt_heads": ("opt", {"num_attention_heads": 5}, "hidden_size is not a multiple of num_attention_heads"),
    "opt_activation": ("opt", {"activation_function": "tanh"}, "activation_function is not supported; got: 'tanh'"),
    "opt_projection": ("opt", {"word_embed_proj_dim": 32}, r"missing: model\.decoder\.project_in\.weight"),
    "opt_no_bias": ("opt", {"enable_bias": False}, r"unknown: model\.decoder\.layers\.0\.fc1\.bias"),
    "opt_no_norm": ("opt", {"_remove_final_layer_norm": True}, r"unknown: model\.decoder\.final_layer_norm\.bias"),
}


@pytest.mark.parametrize(("name", "changes", "words"), BAD.values(), ids=BAD)
def test_a_config_that_does_not_hold_together_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path / "base")
    edit_json(base / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        LLM(base)
