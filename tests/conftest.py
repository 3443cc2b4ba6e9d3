"""What every test shares: one thread, quiet libraries, two tiny bases."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests.tiny import make_llama


def pytest_configure(config: pytest.Config) -> None:
    # Tiny products gain nothing from a second thread, and on a busy machine its barriers cost a factor of ten.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    # PEFT asks every model for the old name, and has advice on merging adapters of tied heads.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    config.addinivalue_line("filterwarnings", "ignore:Model has `tie_word_embeddings=True` and:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take a minute are begun first, so that no worker is left with one when the others are through."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    # Unloading collects garbage, which takes long only because torch and transformers are imported: set them aside.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_model_cards() -> Iterator[None]:
    """PEFT's pages about an adapter, which nobody here reads, take a quarter of the time of making a tiny one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "create_or_update_model_card", lambda self, folder: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def graft_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, for this process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("graft-cache")
        patch.setenv("GRAFT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped-query attention and a head of its own (TL in BEHAVIOURS.md)."""
    return make_llama(tmp_path_factory.mktemp("bases") / "llama")


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head is its embedding table."""
    return make_llama(tmp_path_factory.mktemp("bases") / "tied", tied=True)
