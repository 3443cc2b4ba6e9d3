"""Ranks from 1 to above the smallest dimension, alone and all in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.oracle import World, make_even_adapter
from tests.tiny import ALL_PROJECTIONS

pytestmark = pytest.mark.long

RANKS = (1, 2, 3, 5, 8, 12, 17, 32, 48, 64, 100, 128)


@pytest.mark.parametrize(("head", "use_rslora"), [("untied", False), ("tied", True)], ids=["lora", "rslora_over_tied"])
def test_r039_every_rank_is_served_as_peft_does_and_all_ranks_mix_in_one_batch(
    head: str, use_rslora: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    world: World = request.getfixturevalue(head)
    adapters = {
        f"r{rank}": make_even_adapter(
            world.base,
            tmp_path / f"r{rank}",
            seed=rank,
            r=rank,
            use_rslora=use_rslora,
            target_modules=[*ALL_PROJECTIONS, "lm_head"],
        )
        for rank in RANKS
    }
    with world.loaded(adapters):
        assert {name: adapter.ranks for name, adapter in world.llm.adapters.items()} == {
            f"r{rank}": (rank,) for rank in RANKS
        }
    world.assert_parity(adapters)
