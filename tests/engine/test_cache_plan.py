"""How the KV cache's byte budget is shared out among groups of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.config import EngineConfig
from graftlm.engine.cache_plan import CachePlan, plan_cache
from graftlm.errors import ConfigurationError
from graftlm.layers.kv_cache import KVShape

# One layer, one token: a key and a value of 2 * 8 float32.
TOKEN_BYTES = 128


def plan(layers: list[int], windows: list[int | None], context_len: int = 4096, **config: Any) -> CachePlan:
    """layers: the group of each."""
    shapes = [KVShape(num_kv_heads=2, head_dim=8, group=group) for group in layers]
    return plan_cache(
        EngineConfig(model="base", block_size=16, max_num_batched_tokens=32, **config),
        shapes,
        windows,
        context_len=context_len,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_one_group_takes_the_whole_budget() -> None:
    budget = 2 * TOKEN_BYTES * 16 * 100
    whole = plan([0, 0], [None], kv_cache_bytes=budget + 5)
    assert whole == CachePlan(num_blocks=(100,), sequence_blocks=(256,), block_size=16, max_model_len=1600)


def test_a_sequence_that_takes_the_memory_of_several_is_shorter_where_memory_is_short() -> None:
    budget = 2 * TOKEN_BYTES * 16 * 100
    scarce = plan([0, 0], [None], kv_cache_bytes=budget)
    assert [scarce.longest_sequence(factor) for factor in (1, 2, 3, 101)] == [1600, 800, 528, 0]
    ample = plan([0, 0], [None], kv_cache_bytes=budget, max_model_len=512)
    assert [ample.longest_sequence(factor) for factor in (1, 2, 3, 4)] == [512, 512, 512, 400]
    window = plan([0, 0], [64], kv_cache_bytes=2 * TOKEN_BYTES * 16 * 14, context_len=100_000)
    assert [window.longest_sequence(factor) for factor in (1, 2, 3)] == [100_000, 100_000, 64]


def test_no_group_gets_more_than_its_sequences_can_use() -> None:
    assert plan([0], [None], context_len=64, max_num_seqs=3, kv_cache_bytes=1 << 30).num_blocks == (12,)


def test_what_a_window_does_not_need_goes_to_the_layers_that_see_everything() -> None:
    """Five layers with a window of 64 need 64 + 32 tokens and a block for each of two sequences."""
    layers, windows = [0, 0, 0, 0, 0, 1], [64, None]
    budget = TOKEN_BYTES * 16 * 300
    shared = plan(layers, windows, max_num_seqs=2, kv_cache_bytes=budget)
    assert shared.num_blocks == (14, 300 - 5 * 14)
    assert shared.max_model_len == 230 * 16
    # Without windows the same memory holds a fraction of that.
    assert plan([0] * 6, [None], max_num_seqs=2, kv_cache_bytes=budget).max_model_len == 50 * 16


def test_a_small_budget_is_shared_evenly() -> None:
    shared = plan([0, 1], [64, None], kv_cache_bytes=TOKEN_BYTES * 16 * 8)
    assert shared == CachePlan(num_blocks=(4, 4), sequence_blocks=(7, 256), block_size=16, max_model_len=64)


def test_a_model_of_windows_alone_holds_sequences_of_any_length() -> None:
    only_windows = plan([0, 0], [64], kv_cache_bytes=2 * TOKEN_BYTES * 16 * 7, context_len=100_000)
    assert only_windows == CachePlan(num_blocks=(7,), sequence_blocks=(7,), block_size=16, max_model_len=100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_bytes": 100}, "does not hold a single block; got: 100; allowed: at least 4096 bytes"),
        ({"max_model_len": 5000}, "larger than the model's context; got: 5000; allowed: at most 4096"),
        ({"max_model_len": 100, "kv_cache_bytes": 4096 * 6}, "cannot hold one sequence.*at most 96 tokens"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan([0, 1], [64, None], **options)
