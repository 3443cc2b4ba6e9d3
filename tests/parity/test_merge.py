"""A merged model answers in transformers as PEFT does with the adapter beside its base, or merging is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from graftlm import LLM, merge
from graftlm.cli import app
from graftlm.errors import AdapterUnsupported, CheckpointError, ConfigurationError
from tests import tiny
from tests.parity import lora_cases, method_rig
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import make_even_adapter
from tests.parity.test_fold_methods import CASES as FOLD_CASES
from tests.parity.test_vector_methods import CASES as VECTOR_CASES

# PEFT warns of nearly everything that is done here.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [5, 9, 200, 40, 33, 60, 7]
LOUD = 1e-2
# Every part a patch can have: what is in a patch, and why, is a matter of the tests of serving.
LORA_CASES = {
    name: lora_cases.CASES[name]
    for name in (
        "01_query_value",
        "47_dora_biased",
        "49_dora_ends_tied",
        "52_bias_all_dora",
        "57_saved_embedding_tied",
        "58_saved_ends_ensured",
        "59_saved_mlp",
        "60_ends_tied",
        "60_head_tied",
        "61_tokens_tied",
        "61_tokens_both_ends_tied",
        "61_tokens_dora_bias",
        "62_shrunk_head",
        "62_grown_dora",
        "63_grown_saved_embedding_tied",
        "67_pissa_rslora_biased",
    )
}
METHOD_CASES = {
    name: {**FOLD_CASES, **VECTOR_CASES}[name]
    for name in (
        "lokr-whole",
        "ia3-all-linear",
        "ln-tuning-by-pattern",
        "oft-exact",
        "boft-one-factor",
        "road-4",
        "tokens-tied",
    )
}
ONE_OF_EACH_FAMILY = {case.config_class: case for case in FAMILY_CASES.values()}


@pytest.fixture(scope="module")
def lora_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return lora_cases.make_bases(tmp_path_factory.mktemp("lora_bases"))


@pytest.fixture(scope="module")
def method_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return method_rig.make_bases(tmp_path_factory.mktemp("method_bases"))


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model.eval()(torch.tensor([PROMPT])).logits[0].float()
    return logits


def open_model(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def assert_merged(base: Path, folder: Path, expected: Tensor) -> None:
    """transformers computes `expected` from the merged model in `folder`; the flag tells whether its ends are one."""
    moved = (expected[:, :250] - logits_of(open_model(base))[:, :250]).abs().max()
    assert moved > LOUD, f"too quiet to prove anything: {moved}"
    model = open_model(folder)
    logits = logits_of(model)
    assert logits.shape == expected.shape
    difference, allowed = (logits - expected).abs().max(), 1e-4 * (1 + expected.abs().max())
    assert difference <= allowed, f"logits differ by {difference:.3g}, allowed {allowed:.3g}"
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        assert torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


@pytest.mark.parametrize("name", LORA_CASES)
def test_r019_a_merged_lora_answers_as_the_adapter_beside_its_base(
    name: str, lora_bases: dict[str, Path], tmp_path: Path
) -> None:
    case = LORA_CASES[name]
    base = lora_bases[case.base]
    adapter = lora_cases.make_case(name, case, lora_cases.open_base(base), tmp_path / "adapter")
    merge(base, adapter, tmp_path / "merged")
    assert_merged(
        base, tmp_path / "merged", logits_of(lora_cases.reload(lora_cases.open_base(base), adapter, case.resize))
    )


@pytest.mark.parametrize("name", METHOD_CASES)
def test_a_merged_adapter_of_another_method_answers_as_beside_its_base(
    name: str, method_bases: dict[str, Path], tmp_path: Path
) -> None:
    base_name, method, config = METHOD_CASES[name]
    base = method_bases[base_name]
    adapter = method_rig.make_adapter(base, tmp_path / "adapter", method(task_type="CAUSAL_LM", **config))
    merge(base, adapter, tmp_path / "merged")
    model = peft.PeftModel.from_pretrained(method_rig.open_base(base), adapter)
    assert_merged(base, tmp_path / "merged", logits_of(model))


@pytest.mark.parametrize("case", ONE_OF_EACH_FAMILY.values(), ids=ONE_OF_EACH_FAMILY)
def test_an_adapter_on_every_module_of_every_family_is_merged(case: FamilyCase, tmp_path: Path) -> None:
    base = tiny.make_model(tmp_path / "base", case.config())
    adapter = make_even_adapter(
        base,
        tmp_path / "adapter",
        target_modules=[*case.targets, case.embedding, case.head],
        ensure_weight_tying=False,
        **case.adapter_settings,
    )
    merge(base, adapter, tmp_path / "merged")
    assert_merged(base, tmp_path / "merged", logits_of(peft.PeftModel.from_pretrained(open_model(base), adapter)))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


HEADS_WITH_A_BIAS: dict[str, dict[str, Any]] = {
    "token_rows": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 9]}},
    "saved_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "all_biases": {"target_modules": ["q_proj", "lm_head"], "bias": "all"},
}


@pytest.mark.parametrize("config", HEADS_WITH_A_BIAS.values(), ids=HEADS_WITH_A_BIAS)
def test_a_heads_bias_follows_its_rows(config: dict[str, Any], tmp_path: Path) -> None:
    base = tiny.make_model(tmp_path / "base", ONE_OF_EACH_FAMILY["PhiConfig"].config())
    adapter = method_rig.make_adapter(base, tmp_path / "adapter", lora_cases.lora_config(**config))
    merge(base, adapter, tmp_path / "merged")
    assert_merged(base, tmp_path / "merged", logits_of(peft.PeftModel.from_pretrained(open_model(base), adapter)))


def test_r019_ends_that_stay_one_matrix_stay_tied(lora_bases: dict[str, Path], tmp_path: Path) -> None:
    base = lora_bases["tied"]
    for name, tied in (("01_query_value", True), ("61_tokens_tied", True), ("60_head_tied", False)):
        folder = tmp_path / name
        adapter = lora_cases.make_case(name, LORA_CASES[name], lora_cases.open_base(base), folder / "adapter")
        merge(base, adapter, folder / "merged")
        assert json.loads((folder / "merged" / "config.json").read_text())["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in load_file(folder / "merged" / "model.safetensors")) is not tied


def test_r038_merging_rounds_once(tmp_path: Path) -> None:
    base = tiny.make_llama(tmp_path / "base", dtype=torch.bfloat16)
    adapter = tiny.make_adapter(base, tmp_path / "adapter", target_modules=tiny.ALL_PROJECTIONS, r=8, lora_alpha=16)
    merge(base, adapter, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    factors = load_file(adapter / "adapter_model.safetensors")
    changed = 0
    for name, weight in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in factors:
            update = 2 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
            expected = (weight.float() + update).bfloat16()
            changed += 1
        assert torch.equal(after[name], expected), name
    assert changed == 14


def test_a_sum_of_adapters_is_merged_as_it_is_served(llama: Path, tmp_path: Path) -> None:
    adapters = {
        str(tiny.make_adapter(llama, tmp_path / "one", seed=1)): 0.7,
        str(tiny.make_adapter(llama, tmp_path / "two", seed=2, target_modules=["q_proj", "lm_head"])): -0.3,
    }
    llm = LLM(llama, adapters=dict(zip(("one", "two"), adapters, strict=True)), kv_cache_bytes=8 << 20)
    expected = llm.logits(PROMPT, adapter={"one": 0.7, "two": -0.3})
    merge(llama, adapters, tmp_path / "by_mapping")
    merge(llama, "+".join(f"{path}:{weight}" for path, weight in adapters.items()), tmp_path / "by_name")
    for folder in ("by_mapping", "by_name"):
        assert_merged(llama, tmp_path / folder, expected)


REFUSED: dict[str, tuple[str, str]] = {
    "55_lora_bias": ("untied", "q_proj a bias"),
    "65_alora": ("untied", "from its invocation on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_weights_can_do_is_refused_by_name(name: str, lora_bases: dict[str, Path], tmp_path: Path) -> None:
    base_name, reason = REFUSED[name]
    base = lora_bases[base_name]
    adapter = lora_cases.make_case(name, lora_cases.CASES[name], lora_cases.open_base(base), tmp_path / name)
    with pytest.raises(AdapterUnsupported, match=f"adapter {name} cannot be merged: .*{reason}"):
        merge(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_learned_prompt_is_refused(llama: Path, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    adapter = method_rig.make_adapter(llama, tmp_path / "prompt", config)
    with pytest.raises(AdapterUnsupported, match="virtual tokens stand before every prompt"):
        merge(llama, adapter, tmp_path / "merged")


def test_a_gguf_base_is_refused(llama: Path, tmp_path: Path) -> None:
    from graftlm.demo import demo_model

    adapter = tiny.make_adapter(llama, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="a quantised model cannot be written back"):
        merge(demo_model(), adapter, tmp_path / "merged")


def test_a_folder_with_files_is_not_written_to(llama: Path, tmp_path: Path) -> None:
    adapter = tiny.make_adapter(llama, tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match="not empty"):
        merge(llama, adapter, adapter)


def test_an_adapters_own_tokenizer_goes_with_the_merged_model(llama: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(llama, tmp_path / "base"))
    (base / "vocab.json").write_text("{}")
    adapter = tiny.make_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "plain")
    assert (tmp_path / "plain" / "vocab.json").is_file()
    tiny.write_tokenizer(adapter)
    (adapter / "chat_template.jinja").write_text("mine")
    (adapter / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    merge(base, adapter, tmp_path / "own")
    assert (tmp_path / "own" / "chat_template.jinja").read_text() == "mine"
    assert json.loads((tmp_path / "own" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    assert not (tmp_path / "own" / "vocab.json").exists()


def test_the_command_says_what_it_did(llama: Path, tmp_path: Path) -> None:
    adapter = tiny.make_adapter(llama, tmp_path / "adapter")
    result = CliRunner().invoke(app, ["merge", str(llama), str(adapter), str(tmp_path / "merged")])
    assert result.exit_code == 0
    assert "merged LoRA into 4 modules" in " ".join(result.output.split())
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    again = CliRunner().invoke(app, ["merge", str(llama), str(adapter), str(tmp_path / "merged")])
    assert again.exit_code == 2
    assert "not empty" in again.stderr
