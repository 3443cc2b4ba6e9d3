"""Tokenizers made once for this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.text import Tokenizer, load_tokenizer
from tests.text.tokenizers import write_metaspace_tokenizer
from tests.tiny import write_tokenizer


@pytest.fixture
def byte_level_folder(tmp_path: Path) -> Path:
    """A folder of its own for each test, to be damaged at will."""
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("metaspace")
    write_metaspace_tokenizer(folder)
    return load_tokenizer(folder)
