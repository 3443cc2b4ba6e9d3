"""Engines give back what they took."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import psutil

from graftlm import LLM
from tests.engine.rig import greedy, prompt
from tests.tiny import make_adapter, make_llama


def test_ten_engines_one_after_the_other_need_no_more_memory_than_two(tmp_path: Path) -> None:
    """Each has more than 20 MB of weights, keys and values: one that stayed would be seen."""
    base = make_llama(tmp_path / "base", hidden_size=512, intermediate_size=512)
    adapter = make_adapter(base, tmp_path / "adapter", r=32)
    process = psutil.Process()
    after_cycle = []
    threads = []
    for _ in range(10):
        engine = LLM(base, adapters={"a": adapter}, kv_cache_bytes=8 << 20)
        engine.generate([prompt(200, seed) for seed in range(8)], greedy(4), adapter=["a", None] * 4)
        engine.shutdown()
        after_cycle.append(process.memory_info().rss)
        threads.append(process.num_threads())
    assert max(after_cycle[2:]) <= after_cycle[1] * 1.05
    assert max(threads[2:]) <= threads[1]


def test_an_engine_that_was_shut_down_keeps_nothing_of_its_adapters(llama: Path, adapters: dict[str, Path]) -> None:
    engine = LLM(llama, adapters=adapters, kv_cache_bytes=1 << 20)
    engine.generate([prompt(4)] * 3, greedy(2), adapter=list(adapters))
    references = [weakref.ref(adapter) for adapter in engine.adapters.values()]
    engine.shutdown()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
