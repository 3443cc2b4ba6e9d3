"""Methods that scale, rotate or replace what a module takes in or puts out: the same logits and tokens as PEFT."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.boft import layer as boft_layer
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm import LLM, SamplingParams
from graftlm.adapters.methods import METHODS, REFUSED_METHODS
from graftlm.errors import (
    AdapterCorrupt,
    AdapterIncompatible,
    AdapterUnsupported,
    ContextLengthExceeded,
    InvalidRequest,
)
from tests import tiny
from tests.parity.method_rig import (
    BASES,
    PROMPT,
    Case,
    Expected,
    assert_adapter_is_peft,
    assert_batch_is_peft,
    generate,
    make_adapter,
    make_adapters,
    make_bases,
    run_peft,
)

# PEFT warns of a head among the targets, whose weight it saves as well, and of block sizes that it adjusts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # Prefix tuning hands its cache to transformers under the old name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# name -> base, config class, config.
CASES: dict[str, Case] = {
    "ia3-by-default": ("biased", peft.IA3Config, {}),
    "ia3-all-linear": (
        "biased",
        peft.IA3Config,
        {"target_modules": "all-linear", "feedforward_modules": r".*\.(down|up)_proj"},
    ),
    "ia3-attention-and-head": (
        "untied",
        peft.IA3Config,
        {
            "target_modules": ["k_proj", "v_proj", "lm_head"],
            "feedforward_modules": [],
            "exclude_modules": ["layers.0.self_attn.k_proj"],
            "modules_to_save": ["down_proj"],
        },
    ),
    "ln-tuning-by-default": ("untied", peft.LNTuningConfig, {}),
    "ln-tuning-by-pattern": (
        "biased",
        peft.LNTuningConfig,
        {"target_modules": r".*layers\.1\..*layernorm", "modules_to_save": ["o_proj"]},
    ),
    "oft-by-default": ("biased", peft.OFTConfig, {}),
    "oft-exact": (
        "biased",
        peft.OFTConfig,
        {"oft_block_size": 8, "use_cayley_neumann": False, "target_modules": tiny.ALL_PROJECTIONS, "bias": "all"},
    ),
    "oft-shared-blocks": (
        "untied",
        peft.OFTConfig,
        {"oft_block_size": 16, "block_share": True, "target_modules": ["q_proj", "down_proj", "lm_head"]},
    ),
    "oft-constrained": (
        "untied",
        peft.OFTConfig,
        {
            "r": 7,
            "oft_block_size": 0,
            "coft": True,
            "eps": 2.0,
            "layers_to_transform": [1],
            "target_modules": ATTENTION,
        },
    ),
    "oft-three-terms": ("tied", peft.OFTConfig, {"oft_block_size": 4, "num_cayley_neumann_terms": 3}),
    "oft-two-terms": ("tied", peft.OFTConfig, {"oft_block_size": 4, "num_cayley_neumann_terms": 2}),
    "oft-eight-terms": ("tied", peft.OFTConfig, {"oft_block_size": 4, "num_cayley_neumann_terms": 8}),
    "boft-one-factor": ("biased", peft.BOFTConfig, {"boft_block_size": 8, "bias": "boft_only"}),
    "boft-three-factors": (
        "biased",
        peft.BOFTConfig,
        {"boft_block_size": 4, "boft_n_butterfly_factor": 3, "target_modules": tiny.ALL_PROJECTIONS},
    ),
    "boft-two-factors-by-number": (
        "untied",
        peft.BOFTConfig,
        {
            "boft_block_size": 0,
            "boft_block_num": 4,
            "boft_n_butterfly_factor": 2,
            "target_modules": ["v_proj", "lm_head"],
        },
    ),
    "hra": ("biased", peft.HRAConfig, {"r": 3, "target_modules": tiny.ALL_PROJECTIONS, "bias": "hra_only"}),
    "hra-gram-schmidt": ("untied", peft.HRAConfig, {"apply_GS": True, "target_modules": ["q_proj", "lm_head"]}),
    "road-1": ("biased", peft.RoadConfig, {"group_size": 8}),
    "road-2": (
        "biased",
        peft.RoadConfig,
        {"variant": "road_2", "group_size": 16, "target_modules": tiny.ALL_PROJECTIONS, "modules_to_save": ["norm"]},
    ),
    "road-4": ("tied", peft.RoadConfig, {"variant": "road_4", "group_size": 32, "target_modules": "all-linear"}),
    "tokens-tied": ("tied", peft.TrainableTokensConfig, {"token_indices": [9, 5, 200]}),
    "tokens-untied": ("untied", peft.TrainableTokensConfig, {"token_indices": [9, 5, 200]}),
    "tokens-both-ends": (
        "untied",
        peft.TrainableTokensConfig,
        {"token_indices": [40, 7], "target_modules": ["embed_tokens", "lm_head"]},
    ),
    "prompt-tuning": ("untied", peft.PromptTuningConfig, {"num_virtual_tokens": 5}),
    "prompt-tuning-tied": ("tied", peft.PromptTuningConfig, {"num_virtual_tokens": 17}),
    "prefix-tuning": ("untied", peft.PrefixTuningConfig, {"num_virtual_tokens": 5}),
    "prefix-tuning-projected": (
        "tied",
        peft.PrefixTuningConfig,
        {"num_virtual_tokens": 17, "prefix_projection": True, "encoder_hidden_size": 16},
    ),
    "p-tuning": ("biased", peft.PromptEncoderConfig, {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
}


class PlainFastBlockDiagonal:
    """What PEFT compiles for CUDA: without it PEFT never uses more than one butterfly factor."""

    @staticmethod
    def forward(blocks: Tensor) -> list[Tensor]:
        return [torch.stack([torch.block_diag(*factor.unbind()) for factor in blocks])]


@pytest.fixture(scope="module")
def butterfly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boft_layer, "get_fbd_cuda", PlainFastBlockDiagonal)
        yield


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def folders(bases: dict[str, Path], butterfly: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(CASES, bases, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_peft(
    name: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    base = CASES[name][0]
    assert_adapter_is_peft(name, llms[base], expected[name], unadapted[base])


@pytest.mark.parametrize("base", BASES)
def test_adapters_of_all_methods_and_the_base_share_a_batch_without_touching_each_other(
    base: str, llms: dict[str, LLM], expected: dict[str, Expected], unadapted: dict[str, Expected]
) -> None:
    names = [name for name, case in CASES.items() if case[0] == base]
    assert_batch_is_peft(names, llms[base], expected, unadapted[base])


def test_every_method_of_peft_is_served_or_refused_with_a_reason() -> None:
    assert METHODS.keys() & REFUSED_METHODS.keys() == set()
    assert {peft_type.value for peft_type in peft.PeftType} <= METHODS.keys() | REFUSED_METHODS.keys()


def test_a_method_that_is_not_served_is_refused_with_its_reason(
    llms: dict[str, LLM], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(folders["prompt-tuning"], tmp_path, peft_type="CARTRIDGE")
    with pytest.raises(AdapterUnsupported, match="it starts from a key-value cache"):
        llms["untied"].load_adapter("refused", folder)


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("ia3-by-default", {"feedforward_modules": ["up_proj"]}, AdapterCorrupt, "feedforward_modules"),
        ("ia3-by-default", {"layers_to_transform": [0]}, AdapterUnsupported, "layers_to_transform"),
        (
            "ia3-by-default",
            {"target_modules": ["k_proj"], "feedforward_modules": []},
            AdapterIncompatible,
            "does not target",
        ),
        ("ia3-by-default", {"target_modules": r".*(embed_tokens|down_proj)"}, AdapterUnsupported, "cannot adapt"),
        ("ia3-by-default", {"feedforward_modules": []}, AdapterIncompatible, "ia3_l"),
        ("ln-tuning-by-default", {"target_modules": "all-linear"}, AdapterUnsupported, "cannot adapt"),
        ("oft-by-default", {"oft_block_size": ...}, AdapterUnsupported, "PEFT 0.14"),
        ("oft-by-default", {"r": 8}, AdapterCorrupt, "oft_block_size"),
        ("oft-by-default", {"oft_block_size": 16}, AdapterIncompatible, "oft_R"),
        ("oft-by-default", {"layer_replication": [[0, 1]]}, AdapterUnsupported, "layer_replication"),
        ("boft-one-factor", {"boft_block_num": 2}, AdapterCorrupt, "boft_block_num"),
        ("boft-three-factors", {"boft_n_butterfly_factor": 2}, AdapterIncompatible, "boft_R"),
        ("hra", {"r": 8}, AdapterIncompatible, "hra_u"),
        ("road-1", {"variant": "road_3"}, AdapterCorrupt, "variant"),
        ("road-1", {"variant": "road_2"}, AdapterIncompatible, "road_theta"),
        ("road-1", {"group_size": 7}, AdapterCorrupt, "group_size"),
        ("road-1", {"group_size": 24}, AdapterIncompatible, "groups"),
        ("tokens-tied", {"token_indices": [9, 5, 400]}, AdapterIncompatible, "token 400"),
        ("tokens-tied", {"token_indices": [9, 5]}, AdapterIncompatible, "trainable_tokens_delta"),
        ("tokens-tied", {"token_indices": []}, AdapterCorrupt, "token_indices"),
        ("tokens-both-ends", {"target_modules": ["embed_tokens"]}, AdapterIncompatible, "does not target"),
        ("prompt-tuning", {"num_virtual_tokens": 4}, AdapterIncompatible, "prompt_embeddings"),
        ("prompt-tuning", {"num_virtual_tokens": 0}, AdapterCorrupt, "virtual tokens"),
        ("prompt-tuning", {"num_transformer_submodules": 2}, AdapterUnsupported, "submodules"),
        ("prompt-tuning", {"modules_to_save": ["lm_head"]}, AdapterUnsupported, "modules_to_save"),
        ("prefix-tuning", {"num_virtual_tokens": 4}, AdapterIncompatible, "prompt_embeddings"),
        ("prefix-tuning", {"num_attention_heads": 4}, AdapterIncompatible, "key-value heads"),
        ("prefix-tuning", {"num_transformer_submodules": 2}, AdapterUnsupported, "submodules"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_refused_by_name(
    name: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    llms: dict[str, LLM],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = copy_of(folders[name], tmp_path, **changes)
    with pytest.raises(error, match=message):
        llms[CASES[name][0]].load_adapter("refused", folder)


@pytest.mark.parametrize("name", ["oft-by-default", "boft-one-factor", "hra", "road-1", "ia3-by-default"])
def test_keys_with_the_adapters_own_name_are_understood(
    name: str, llms: dict[str, LLM], folders: dict[str, Path], expected: dict[str, Expected], tmp_path: Path
) -> None:
    folder = copy_of(folders[name], tmp_path)
    weights = folder / "adapter_model.safetensors"
    roles = re.compile(r"\.(oft_R|boft_[Rs]|hra_u|road_\w+|ia3_l)")
    save_file({roles.sub(r".\1.mine", key): tensor for key, tensor in load_file(weights).items()}, weights)
    llm = llms[CASES[name][0]]
    llm.load_adapter("renamed", folder)
    torch.testing.assert_close(llm.logits(PROMPT, adapter="renamed"), expected[name].logits, rtol=1e-4, atol=1e-4)
    llm.unload_adapter("renamed")


def test_rows_of_a_vocabulary_that_was_resized_before_training_are_those_of_peft(
    bases: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    config = peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[259, 299, 5])
    make_adapter(bases["tied"], tmp_path, config, vocab_size=300)
    reference = run_peft(bases["tied"], tmp_path, vocab_size=300, prompt=[*PROMPT, 299])
    llms["tied"].load_adapter("resized", tmp_path)
    logits = llms["tied"].logits([*PROMPT, 299], adapter="resized")
    torch.testing.assert_close(logits, reference.logits, rtol=1e-4, atol=1e-4)
    llms["tied"].unload_adapter("resized")


def test_virtual_tokens_are_not_reported_and_never_chosen(llms: dict[str, LLM]) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3
    )
    [output] = llms["untied"].generate({"prompt_token_ids": PROMPT}, params, adapter="prompt-tuning")
    assert output.prompt_token_ids == tuple(PROMPT)
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == PROMPT
    logprobs = llms["untied"].logits(PROMPT, adapter="prompt-tuning").log_softmax(dim=-1)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.logprob == pytest.approx(float(logprobs[position, PROMPT[position + 1]]), abs=1e-4)
    assert max(output.outputs[0].token_ids) < 259


def test_virtual_tokens_count_towards_the_context(bases: dict[str, Path], folders: dict[str, Path]) -> None:
    llm = LLM(bases["untied"], max_model_len=16, adapters={"prompt": folders["prompt-tuning"]})
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, adapter="prompt")
    assert len(output.outputs[0].token_ids) == 16 - 5 - len(PROMPT)
    with pytest.raises(ContextLengthExceeded, match="a prompt of 12 tokens, 5 virtual tokens of its adapter"):
        llm.logits([1] * 12, adapter="prompt")
    with pytest.raises(ContextLengthExceeded, match="5 virtual tokens of its adapter and 3 to generate"):
        llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=3), adapter="prompt")


def test_a_learned_prompt_may_be_computed_in_several_steps(
    bases: dict[str, Path], folders: dict[str, Path], expected: dict[str, Expected]
) -> None:
    adapters = {name: folders[name] for name in ("prompt-tuning", "prefix-tuning", "boft-two-factors-by-number")}
    llm = LLM(bases["untied"], max_num_batched_tokens=4, max_num_seqs=4, adapters=adapters)
    for name in ("prompt-tuning", "prefix-tuning"):
        assert generate(llm, [name, None, name])[::2] == [expected[name].token_ids] * 2
        logits = llm.logits(PROMPT, adapter=name)
        torch.testing.assert_close(logits, expected[name].logits, rtol=1e-4, atol=1e-4)


def test_a_virtual_token_cannot_be_named_by_a_prompt(llms: dict[str, LLM]) -> None:
    with pytest.raises(InvalidRequest, match="not a token id"):
        llms["untied"].logits([5, 259], adapter="prompt-tuning")


def copy_of(folder: Path, target: Path, **changes: Any) -> Path:
    copied = Path(shutil.copytree(folder, target / folder.name))
    tiny.edit_json(copied / "adapter_config.json", **changes)
    return copied
