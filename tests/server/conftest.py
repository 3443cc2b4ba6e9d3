"""One tiny engine behind one real server for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from graftlm import AsyncLLM
from tests.server.live_server import LiveServer, serving
from tests.tiny import make_adapter, make_llama

CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Files:
    """Checkpoints on disk. `roots` is what clients may load from; `secret` is an adapter outside it."""

    base: Path
    red: Path
    blue: Path
    roots: Path
    secret: Path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("http")
    base = make_llama(folder / "base", max_position_embeddings=CONTEXT)
    roots = folder / "roots"
    (roots / "nested").mkdir(parents=True)
    made = Files(
        base=base,
        red=make_adapter(base, roots / "red", seed=1),
        blue=make_adapter(base, roots / "nested" / "blue", seed=2, r=4),
        roots=roots,
        secret=make_adapter(base, folder / "secret", seed=3),
    )
    (roots / "escape").symlink_to(made.secret)
    return made


@pytest.fixture(scope="session")
def server(files: Files) -> Iterator[LiveServer]:
    llm = AsyncLLM(
        files.base,
        name="tiny/llama",
        adapters={"red": files.red, "blue": files.blue},
        kv_cache_bytes=16 << 20,
    )
    with serving(llm, adapter_roots=[files.roots]) as live:
        yield live


@pytest.fixture(scope="session")
def short_server(files: Files) -> Iterator[LiveServer]:
    """128 positions, one sequence at a time."""
    llm = AsyncLLM(
        files.base, name="tiny", adapters={"red": files.red}, max_model_len=128, max_num_seqs=1, kv_cache_bytes=1 << 20
    )
    with serving(llm) as live:
        yield live
