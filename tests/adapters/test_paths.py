"""Where an adapter may lie, and what it may be called."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graftlm import LLM
from graftlm.errors import AdapterFilesNotFound, AdapterNameInvalid, AdapterNameTaken, ModelNotFound
from tests.adapters.conftest import PROMPT

FORMS = {
    "dotted": "./adapters/a",
    "trailing_slash": "adapters/a/",
    "bare": "adapters/a",
    "dots_in_the_name": "adapters/my.adapter-v1.0",
    "like_a_hub_id_with_two_slashes": "adapters/org/name",
    "symlinked_parent": "link/a",
    "up_and_down": "adapters/org/../a",
    "the_file": "adapters/a/adapter_model.safetensors",
    "the_file_through_a_link": "link/a/adapter_model.safetensors",
}


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a", "my.adapter-v1.0", "org/name"):
        shutil.copytree(good, tmp_path / "adapters" / name)
    (tmp_path / "link").symlink_to(tmp_path / "adapters")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_r003_r004_a_local_path_in_any_form_is_used_without_the_network(
    form: str, folder: Path, llm: LLM, good: Path, no_network: None
) -> None:
    llm.load_adapter("form", form)
    llm.load_adapter("good", good)
    try:
        assert llm.adapters["form"].digest == llm.adapters["good"].digest
        assert llm.logits(PROMPT, adapter="form").equal(llm.logits(PROMPT, adapter="good"))
    finally:
        llm.unload_adapter("form")
        llm.unload_adapter("good")


def test_r003_a_path_may_start_at_the_home_folder(
    folder: Path, llm: LLM, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    llm.load_adapter("home", "~/adapters/a")
    llm.unload_adapter("home")


MISSING = {
    "absolute": "/no/such/adapter",
    "dotted": "./adapters/missing",
    "bare_in_an_existing_folder": "adapters/missing",
    "two_slashes": "adapters/org/missing",
    "name_alone": "missing",
    "file": "adapters/a/other.safetensors",
    "empty": "",
    "nul": "adapters/a\0",
    "not_unicode": "adapters/\udcff",
    "unknown_user": "~nobody-of-this-name/adapter",
    "url": "https://example.com/adapter",
    "file_url": "file:///etc/passwd",
    "ten_kilobytes": "x" * 10_000,
    "long_parts": "a/" * 5_000,
    "below_a_file": "adapters/a/adapter_config.json/x",
}


@pytest.mark.parametrize("path", MISSING.values(), ids=MISSING)
def test_r003_r060_a_path_where_nothing_lies_is_refused_without_the_network(
    path: str, folder: Path, refuse: Callable[..., str], no_network: None
) -> None:
    message = refuse(path, AdapterFilesNotFound, "no such adapter|cannot be opened|no adapter_config")
    assert message.isprintable()


def test_r004_r060_each_missing_file_is_named(folder: Path, refuse: Callable[..., str]) -> None:
    (folder / "adapters" / "a" / "adapter_config.json").unlink()
    refuse("adapters/a", AdapterFilesNotFound, r"no adapter_config\.json")
    refuse("adapters/a/adapter_model.safetensors", AdapterFilesNotFound, r"no adapter_config\.json")
    (folder / "adapters" / "my.adapter-v1.0" / "adapter_model.safetensors").unlink()
    refuse("adapters/my.adapter-v1.0", AdapterFilesNotFound, r"has no weights.*adapter_model\.safetensors")
    (folder / "empty").mkdir()
    refuse("empty", AdapterFilesNotFound, r"no adapter_config\.json")


def test_r060_a_folder_where_the_weights_are_a_folder_is_refused(folder: Path, refuse: Callable[..., str]) -> None:
    weights = folder / "adapters" / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.mkdir()
    refuse("adapters/a", AdapterFilesNotFound, "has no weights")


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin"])
def test_weights_that_are_a_device_are_not_read(target: str, folder: Path, refuse: Callable[..., str]) -> None:
    weights = folder / "adapters" / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(target)
    refuse("adapters/a", AdapterFilesNotFound, "has no weights")


def test_a_pipe_in_place_of_a_file_does_not_block_the_loader(folder: Path, refuse: Callable[..., str]) -> None:
    config = folder / "adapters" / "a" / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)
    refuse("adapters/a", AdapterFilesNotFound, r"no adapter_config\.json")


NAMES = ["", "a/b", "../a", "..", "a..b", ".hidden", "-x", "a b", "a\0b", "a\n", "é", "x" * 129, "x" * 10_000, None, 5]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:12])
def test_a_name_that_is_no_name_is_refused(
    name: str, good: Path, llm: LLM, refuse: Callable[..., str], no_network: None
) -> None:
    refuse(good, AdapterNameInvalid, "cannot be an adapter's name", name=name)


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "0", "x" * 128, "llama2"])
def test_a_plain_name_is_accepted(name: str, good: Path, llm: LLM) -> None:
    llm.load_adapter(name, good)
    assert llm.adapters[name].name == name
    llm.unload_adapter(name)


def test_the_base_models_name_and_a_loaded_name_are_taken(good: Path, llm: LLM, refuse: Callable[..., str]) -> None:
    refuse(good, AdapterNameTaken, "base model", name=llm.model_name)
    first = llm.load_adapter("a", good)
    with pytest.raises(AdapterNameTaken, match="another adapter"):
        llm.load_adapter("a", good)
    assert llm.adapters == {"a": first}
    llm.unload_adapter("a")


def test_an_unknown_name_is_answered_with_the_known_ones_and_never_by_the_base(good: Path, llm: LLM) -> None:
    llm.load_adapter("known", good)
    try:
        for name in ("unknown", "Known", "known ", "../../known", str(good), "x" * 10_000):
            with pytest.raises(ModelNotFound, match=f"allowed: {llm.model_name}, known"):
                llm.generate("text", adapter=name)
            with pytest.raises(ModelNotFound):
                llm.logits(PROMPT, adapter=name)
            with pytest.raises(ModelNotFound):
                llm.unload_adapter(name)
    finally:
        llm.unload_adapter("known")
