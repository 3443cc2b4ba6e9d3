"""Options that come from the configuration classes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from graftlm.cli import app
from graftlm.cli.byte_size import format_byte_size, parse_byte_size
from graftlm.cli.options import field_help, parse_adapters
from graftlm.config import EngineConfig
from graftlm.engine.sampling_params import SamplingParams
from graftlm.errors import ConfigurationError

WIDE = {"COLUMNS": "400", "TERM": "dumb"}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1500000", 1_500_000),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("1GB", 10**9),
        ("64kib", 65536),
        ("0.1KB", 100),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text) == num_bytes
    assert parse_byte_size(format_byte_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "GiB", "-1GiB", "2 giga", "1e9", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a size"):
        parse_byte_size(text)


def test_adapters_are_name_and_path() -> None:
    assert parse_adapters(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}


@pytest.mark.parametrize("entries", [["a"], ["=b"], ["a="], [""], ["a=b", "a=c"]])
def test_other_adapter_entries_are_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        parse_adapters(entries)


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_engine_option_has_a_flag_with_its_help_and_default(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env=WIDE).output
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("model", "adapters"):
            assert f"--{field.name.replace('_', '-')} " in shown
        assert field_help(EngineConfig)[field.name] in shown
        if field.default is True:
            assert f"--no-{field.name.replace('_', '-')} " in shown
    assert "[default: 4GiB]" in shown
    assert "[default: 64]" in shown


@pytest.mark.parametrize("owner", [EngineConfig, SamplingParams])
def test_every_field_is_described(owner: type) -> None:
    assert set(field_help(owner)) == {field.name for field in dataclasses.fields(owner)}


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"], env=WIDE)
    assert result.exit_code == 0
    for command in ("serve", "generate", "chat"):
        assert command in result.output


def test_what_needs_no_model_does_not_wait_for_torch() -> None:
    asked = "import sys, graftlm.cli; print({'torch', 'transformers', 'ray', 'numpy', 'fastapi'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", asked], text=True) == "set()\n"
