"""One engine to load adapters into, one good adapter, and a judge of refusals."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm import LLM
from graftlm.errors import AdapterError
from tests.parity.oracle import Oracle, make_even_adapter, prompt_of
from tests.tiny import edit_json

PROMPT = prompt_of(24, 1)


@pytest.fixture(scope="session")
def llm(llama: Path) -> LLM:
    return LLM(llama, kv_cache_bytes=4 << 20)


@pytest.fixture(scope="session")
def oracle(llama: Path) -> Oracle:
    return Oracle(llama)


@pytest.fixture(scope="session")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q_proj and v_proj, rank 8: eight tensors."""
    return make_even_adapter(llama, tmp_path_factory.mktemp("adapters") / "good")


@pytest.fixture(scope="session")
def base_logits(oracle: Oracle, llm: LLM) -> torch.Tensor:
    logits = llm.logits(PROMPT)
    assert (logits - oracle.logits(PROMPT)).abs().max() < 1e-4
    return logits


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that copies the good adapter, with changes to its config."""

    def make(name: str = "copy", **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        edit_json(folder / "adapter_config.json", **changes)
        return folder

    return make


@pytest.fixture
def refuse(llm: LLM, base_logits: torch.Tensor) -> Iterator[Callable[..., str]]:
    """A function that demands a refusal, and that nothing is left of the adapter; it returns the message."""

    def load(path: str | Path, error: type[AdapterError], match: str, *, name: str = "bad") -> str:
        with pytest.raises(error, match=match) as caught:
            llm.load_adapter(name, path)
        assert type(caught.value) is error
        assert len(str(caught.value)) < 1000
        assert not llm.adapters
        assert llm.logits(PROMPT).equal(base_logits)
        return str(caught.value)

    yield load
    for name in llm.adapters:  # what should have been refused must not fail the tests that follow
        llm.unload_adapter(name)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to open a connection or resolve a name fails the test."""

    def forbidden(*arguments: object, **_: object) -> None:
        pytest.fail(f"the network was asked for {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "connect_ex", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
