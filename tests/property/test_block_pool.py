"""The block pool against a set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.engine.block_pool import BlockId, BlockPool


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(num_blocks=st.integers(0, 12), data=st.data())
def test_no_block_is_lost_or_given_out_twice(num_blocks: int, data: st.DataObject) -> None:
    pool = BlockPool(num_blocks)
    taken: set[BlockId] = set()
    for _ in range(data.draw(st.integers(0, 25))):
        count = data.draw(st.integers(0, num_blocks + 1))
        if data.draw(st.booleans()):
            if count > num_blocks - len(taken):
                with pytest.raises(ValueError, match=f"{count} blocks asked for"):
                    pool.allocate(count)
                continue
            blocks = pool.allocate(count)
            assert len(set(blocks)) == count
            assert not taken & set(blocks)
            taken |= set(blocks)
        elif taken:
            blocks = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True))
            pool.free(blocks)
            taken -= set(blocks)
        assert pool.num_free == num_blocks - len(taken)
        assert all(0 <= block < num_blocks for block in taken)


def test_a_block_is_not_taken_back_twice() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(ValueError, match="is not taken"):
        pool.free(blocks[:1])
    assert pool.num_free == 3


def test_a_block_that_was_never_given_out_is_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="is not taken"):
        pool.free([BlockId(2)])
