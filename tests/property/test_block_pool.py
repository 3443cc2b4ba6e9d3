"""The block pool against a set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.engine.block_pool import BlockHash, BlockId, BlockPool


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


def test_blocks_are_given_out_again_before_those_that_never_were() -> None:
    pool = BlockPool(6)
    first = pool.allocate(3)
    pool.free(first)
    assert set(pool.allocate(3)) == set(first)


def test_blocks_whose_content_is_known_are_given_out_last_and_the_longest_free_first() -> None:
    pool = BlockPool(4)
    older, newer, unknown = pool.allocate(3)
    pool.record(older, BlockHash(b"older"))
    pool.record(newer, BlockHash(b"newer"))
    pool.free([older, newer, unknown])
    assert older not in pool.allocate(2)
    assert pool.find(BlockHash(b"older")) == older
    assert pool.allocate(1) == [older]
    assert pool.find(BlockHash(b"older")) is None
    assert pool.find(BlockHash(b"newer")) == newer
