"""One base, three loud adapters of different ranks and targets, and one engine over them for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM
from tests.engine.rig import BLOCK_BYTES, oracle
from tests.tiny import ALL_PROJECTIONS, make_adapter


@pytest.fixture(scope="session")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "red": make_adapter(llama, folder / "red", seed=1),
        "green": make_adapter(llama, folder / "green", seed=2, r=3, target_modules=ALL_PROJECTIONS),
        "blue": make_adapter(llama, folder / "blue", seed=3, r=16, target_modules=["down_proj", "k_proj", "lm_head"]),
    }


@pytest.fixture(scope="session")
def llm(llama: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    engine = LLM(llama, adapters=adapters, kv_cache_bytes=512 * BLOCK_BYTES)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def reference(llama: Path) -> Any:
    """The base in transformers."""
    return oracle(llama)
