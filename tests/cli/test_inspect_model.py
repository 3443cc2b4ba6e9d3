"""`graft inspect MODEL`: how each module is stored."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from graftlm.cli import app
from tests.parity.quantized_bases import FORMATS, gguf_base
from tests.tiny import make_llama

WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"), intermediate_size=128, vocab_size=260)


def inspect(*arguments: str | Path) -> list[list[str]]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env=WIDE)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines() if line.strip()]


def test_a_full_precision_models_matrices_are_counted_by_kind(base: Path) -> None:
    rows = inspect(base)
    assert ["model.layers.*.self_attn.k_proj", "2", "32x64", "float32", "32.00", "16,384"] in rows
    assert ["lm_head", "1", "260x64", "float32", "32.00", "66,560"] in rows
    assert "not quantised" in " ".join(rows[-1])


def test_a_quantised_models_formats_bits_and_bytes_are_shown(base: Path, tmp_path: Path) -> None:
    rows = inspect(FORMATS["nf4_stored_as_bfloat16"](base, tmp_path).quantized)
    down = next(row for row in rows if row[0] == "model.layers.*.mlp.down_proj")
    assert down[1:3] == ["2", "64x128"]
    assert "nf4-double, blocks of 64" in " ".join(down)
    assert ["lm_head", "1", "260x64", "float32", "32.00", "66,560"] in rows
    assert "bitsandbytes" in " ".join(rows[-1])


def test_every_module_of_a_gguf_file_is_listed_on_request(base: Path, tmp_path: Path) -> None:
    rows = inspect(gguf_base(base, tmp_path, gguf.GGMLQuantizationType.Q4_0).quantized, "--every-module")
    assert ["model.layers.1.self_attn.q_proj", "1", "64x64", "Q4_0", "4.50", "2,304"] in rows
    assert ["model.embed_tokens", "1", "260x64", "Q4_0", "4.50", "9,360"] in rows


def test_a_model_is_not_fitted_to_a_base(base: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(base), "--base", str(base)])
    assert result.exit_code == 2
    assert "--base is for adapters" in result.output
