"""`graft inspect`: what a folder holds, and whether it fits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graftlm.cli import app
from tests import tiny
from tests.parity import lora_cases


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_adapter(
        base,
        tmp_path_factory.mktemp("adapter"),
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"v_proj": 4, r"layers.1.*up_proj": 16},
        alpha_pattern={"v_proj": 32},
    )


def inspect(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and words of the command's output, however the table broke the lines."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.output


def test_r007_each_modules_rank_and_scaling_is_printed(adapter: Path) -> None:
    code, output = inspect(adapter, "--every-module")
    assert code == 0
    rows = {words[0]: words[1:4] for line in output.splitlines() if (words := line.split()) and "layers" in words[0]}
    assert rows["model.layers.0.self_attn.q_proj"] == ["1", "8", "2"]
    assert rows["model.layers.0.self_attn.v_proj"] == ["1", "4", "8"]
    assert rows["model.layers.0.mlp.up_proj"] == ["1", "8", "2"]
    assert rows["model.layers.1.mlp.up_proj"] == ["1", "16", "1"]


def test_modules_that_differ_only_in_their_layer_share_a_row(adapter: Path) -> None:
    _, output = inspect(adapter)
    rows = [line.split()[:4] for line in output.splitlines() if "model.layers" in line]
    assert ["model.layers.*.self_attn.q_proj", "2", "8", "2"] in rows
    assert ["model.layers.*.mlp.up_proj", "1", "16", "1"] in rows


def test_an_adapter_that_fits_its_base_says_how_many_tensors_bind(adapter: Path, base: Path) -> None:
    code, output = inspect(adapter, "--base", base)
    assert code == 0
    assert "bound 12 of 12 tensors" in " ".join(output.split())


def test_an_adapter_of_another_base_does_not_fit(adapter: Path, tmp_path: Path) -> None:
    other = tiny.make_llama(tmp_path / "other", hidden_size=32)
    code, output = inspect(adapter, "--base", other)
    assert code == 1
    assert "has another shape in this base" in " ".join(output.split())


def test_an_adapter_that_is_not_served_is_still_described(adapter: Path, tmp_path: Path) -> None:
    routing = Path(shutil.copytree(adapter, tmp_path / "routing"))
    tiny.edit_json(routing / "adapter_config.json", arrow_config={"top_k": 2})
    code, output = inspect(routing)
    assert code == 1
    assert "model.layers.*.self_attn.q_proj" in output
    assert "arrow_config is not supported" in " ".join(output.split())


def test_tokenizer_files_beside_the_weights_are_listed(adapter: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "with-text"))
    tiny.write_tokenizer(folder)
    _, output = inspect(folder)
    assert "tokenizer.json" in output


def test_what_becomes_of_each_module_is_printed(base: Path, tmp_path: Path) -> None:
    mixed = tiny.make_adapter(
        base, tmp_path / "mixed", use_dora=True, modules_to_save=["lm_head"], trainable_token_indices=[5, 9]
    )
    code, output = inspect(mixed, "--base", base)
    assert code == 0
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "model.layers.*.self_attn.q_proj 2 8 2 LoRA, DoRA" in rows
    assert "lm_head 1 replaced" in rows
    assert "model.embed_tokens 1 token rows" in rows


CHECKED: dict[str, tuple[bool, dict[str, Any]]] = {
    "lora": (False, {"target_modules": [*tiny.ALL_PROJECTIONS, "lm_head", "embed_tokens"]}),
    "tokens": (True, {"trainable_token_indices": [5, 9, 200]}),
    "invoked": (False, {"alora_invocation_tokens": [17, 18]}),
}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of adapters on both ends
@pytest.mark.parametrize("name", CHECKED)
def test_an_adapter_is_checked_against_peft(name: str, tmp_path: Path) -> None:
    tied, config = CHECKED[name]
    base = tiny.make_llama(tmp_path / "base", tied=tied)
    code, output = inspect(tiny.make_adapter(base, tmp_path / "adapter", **config), "--base", base, "--check")
    words = " ".join(output.split())
    assert code == 0, words
    assert "Agrees with PEFT" in words
    assert "48 of 48 greedy tokens are equal" in words
    moved = re.search(r"moves the base's by ([\d.]+)", words)
    assert moved is not None
    assert float(moved[1]) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_with_a_larger_vocabulary_is_checked_too(tmp_path: Path) -> None:
    base = tiny.make_llama(tmp_path / "base")
    case = lora_cases.CASES["62_grown_trained"]
    folder = lora_cases.make_case("grown", case, lora_cases.open_base(base), tmp_path / "adapter")
    code, output = inspect(folder, "--base", base, "--check")
    assert code == 0
    assert "Agrees with PEFT" in output


def test_an_adapter_that_answers_otherwise_than_peft_is_told_apart(adapter: Path, base: Path, tmp_path: Path) -> None:
    """PEFT reads a tensor whose name is spelt another way as absent, and answers with one module less."""
    folder = Path(shutil.copytree(adapter, tmp_path / "respelt"))
    lora_cases.rewrite(
        folder / "adapter_model.safetensors",
        lambda tensors: {name.replace("layers.0", "module.layers.0"): t for name, t in tensors.items()},
    )
    with pytest.warns(UserWarning, match="missing adapter keys"):
        code, output = inspect(folder, "--base", base, "--check")
    assert code == 1
    assert "Disagrees with PEFT" in output


def test_a_check_without_a_base_says_what_is_missing(adapter: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(adapter), "--check"])
    assert result.exit_code == 2
    assert "--base" in result.stderr


def test_a_missing_folder_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no such adapter" in result.stderr
    assert "Traceback" not in result.output
