"""A tiny base and two loud adapters on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny import make_adapter, make_llama


@dataclass(frozen=True, kw_only=True)
class Files:
    base: Path
    red: Path
    blue: Path

    @property
    def arguments(self) -> list[str]:
        """MODEL and the options that load both adapters."""
        adapters = ["--adapter", f"red={self.red}", "--adapter", f"blue={self.blue}"]
        return [str(self.base), "--name", "tiny", *adapters, "--kv-cache-bytes", "16MiB"]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("cli")
    base = make_llama(folder / "base", max_position_embeddings=16384)
    return Files(
        base=base, red=make_adapter(base, folder / "red", seed=1), blue=make_adapter(base, folder / "blue", seed=2)
    )
