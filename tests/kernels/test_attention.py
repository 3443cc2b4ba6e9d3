"""Ragged attention over the paged cache against softmax(q k) v, written out in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

CANARY = 1e4
SCORES = ops.AttentionScores(scale=0.35)
HEADS = {"multi-head": (4, 4), "grouped-query": (6, 2), "multi-query": (4, 1)}


@dataclass(frozen=True)
class Sequence:
    """query: [query_len, H, D]. key, value: [total_len, K, D], the query's own positions last."""

    query: Tensor
    key: Tensor
    value: Tensor
    blocks: list[int]


def make_sequence(query_len: int, total_len: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> Sequence:
    num_heads, num_kv_heads = heads
    return Sequence(
        query=torch.randn(query_len, num_heads, dim).to(dtype),
        key=torch.randn(total_len, num_kv_heads, dim).to(dtype),
        value=torch.randn(total_len, num_kv_heads, dim).to(dtype),
        blocks=[],
    )


def fill_cache(sequences: list[Sequence], block_size: int, spare_blocks: int = 3) -> tuple[Tensor, Tensor]:
    """Give every sequence random blocks and write its tokens; every other slot holds a loud finite value."""
    counts = [-(-len(sequence.key) // block_size) for sequence in sequences]
    order = list(range(sum(counts) + spare_blocks))
    random.Random(0).shuffle(order)
    _, num_kv_heads, dim = sequences[0].key.shape
    shape = (len(order), block_size, num_kv_heads, dim)
    caches = torch.full(shape, CANARY, dtype=sequences[0].key.dtype), torch.full(shape, -CANARY).to(sequences[0].key)
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.blocks.extend(order.pop() for _ in range(count))
        for position in range(len(sequence.key)):
            block, offset = sequence.blocks[position // block_size], position % block_size
            caches[0][block, offset] = sequence.key[position]
            caches[1][block, offset] = sequence.value[position]
    return caches


def dense_attention(sequence: Sequence, scores: ops.AttentionScores, window: int | None) -> Tensor:
    """One sequence, one head and one query at a time."""
    query, key, value = sequence.query.double(), sequence.key.double(), sequence.value.double()
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for row, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        visible = len(key) - len(query) + row + 1
        oldest = 0 if window is None else max(visible - window, 0)
        keys, values = key[oldest:visible, head // group], value[oldest:visible, head // group]
        products = scores.scale * (keys @ query[row, head])
        if scores.softcap is not None:
            products = scores.softcap * torch.tanh(products / scores.softcap)
        if scores.slopes is not None:
            bias = scores.slopes[head] * torch.arange(oldest, visible)
            products = products + bias.double() * scores.slope_factor
        weights = torch.exp(products)
        sink = 0.0 if scores.sinks is None else torch.exp(scores.sinks[head].double())
        out[row, head] = (weights / (weights.sum() + sink)) @ values
    return out


def attend(
    sequences: list[Sequence], block_size: int, scores: ops.AttentionScores, window: int | None = None
) -> Tensor:
    key_cache, value_cache = fill_cache(sequences, block_size)
    plan = ops.plan_attention(
        [len(sequence.query) for sequence in sequences],
        [len(sequence.key) for sequence in sequences],
        # Tables as the engine hands them over: they may be longer than what this step needs.
        [[*sequence.blocks, 0, 1] for sequence in sequences],
        block_size=block_size,
        window=window,
        device=torch.device("cpu"),
    )
    query = torch.cat([sequence.query for sequence in sequences])
    return ops.paged_attention(query, key_cache, value_cache, plan, scores)


def check(
    sequences: list[Sequence],
    block_size: int,
    scores: ops.AttentionScores = SCORES,
    window: int | None = None,
    tolerance: float = 1e-5,
) -> None:
    expected = torch.cat([dense_attention(sequence, scores, window) for sequence in sequences])
    got = attend(sequences, block_size, scores, window)
    assert got.dtype == sequences[0].query.dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_decodes_of_every_length_are_attended_together(heads: tuple[int, int], block_size: int) -> None:
    torch.manual_seed(0)
    lengths = [257, 1, 16, 2, 255, 15, 17, 256]
    check([make_sequence(1, length, heads, 8, torch.float32) for length in lengths], block_size)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_prompts_and_their_chunks_are_attended_causally(heads: tuple[int, int], block_size: int) -> None:
    torch.manual_seed(1)
    shapes = [(1, 1), (2, 2), (15, 15), (16, 16), (17, 17), (65, 65), (7, 16), (7, 17), (2, 255), (33, 257), (16, 32)]
    check([make_sequence(query, total, heads, 8, torch.float32) for query, total in shapes], block_size)


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_of_chunks_and_decodes_match_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice([(4, 4), (8, 2), (3, 1), (1, 1)])
    shapes = [(1, rng.randint(1, 90)) for _ in range(rng.randint(1, 6))]
    for _ in range(rng.randint(0, 4)):
        total = rng.randint(1, 60)
        shapes.append((rng.randint(1, total), total))
    rng.shuffle(shapes)
    sequences = [make_sequence(query, total, heads, rng.choice([4]), torch.float32) for query, total in shapes]
    check(sequences, rng.choice([1, 2, 16, 64]), ops.AttentionScores(scale=rng.uniform(0.1, 1.0)))


KINDS_OF_SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.01])},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -4.0])},
    "scaled alibi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.01]), "slope_factor": 0.3},
    "softcap and alibi": {"softcap": 1.5, "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.01])},
}


@pytest.mark.parametrize("window", [None, 1, 8, 16, 17, 300])
@pytest.mark.parametrize("kind", KINDS_OF_SCORES)
def test_scores_are_made_as_the_model_says(kind: str, window: int | None) -> None:
    torch.manual_seed(6)
    shapes = [(1, 1), (1, 17), (1, 40), (5, 21), (8, 8), (20, 20), (3, 64)]
    sequences = [make_sequence(query, total, (6, 2), 8, torch.float32) for query, total in shapes]
    check(sequences, 8, ops.AttentionScores(scale=0.35, **KINDS_OF_SCORES[kind]), window)


def test_slopes_in_bfloat16_round_their_products_with_positions() -> None:
    """Falcon's bias: from position 257 on, bfloat16 cannot tell all positions apart."""
    torch.manual_seed(6)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.01], dtype=torch.bfloat16)
    sequences = [make_sequence(query, total, (6, 2), 8, torch.float32) for query, total in [(1, 300), (5, 290), (9, 9)]]
    check(sequences, 8, ops.AttentionScores(scale=0.35, slopes=slopes, slope_factor=0.3))


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 256, 1000])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_window_hides_what_lies_behind_it(heads: tuple[int, int], window: int, block_size: int) -> None:
    torch.manual_seed(7)
    shapes = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 40), (5, 21), (8, 8), (20, 20), (33, 64), (2, 257), (1, 257)]
    check([make_sequence(query, total, heads, 8, torch.float32) for query, total in shapes], block_size, window=window)


def test_blocks_behind_the_window_are_not_read() -> None:
    """They may be another sequence's by now."""
    torch.manual_seed(8)
    decode, chunk = (make_sequence(query, 40, (4, 2), 8, torch.float32) for query in (1, 6))
    key_cache, value_cache = fill_cache([decode, chunk], 4)
    window = 9
    behind = [*decode.blocks[: (40 - window) // 4], *chunk.blocks[: (35 - window) // 4]]
    key_cache[behind], value_cache[behind] = torch.nan, torch.nan
    plan = ops.plan_attention(
        [1, 6], [40, 40], [decode.blocks, chunk.blocks], block_size=4, window=window, device=torch.device("cpu")
    )
    got = ops.paged_attention(torch.cat([decode.query, chunk.query]), key_cache, value_cache, plan, SCORES)
    expected = torch.cat([dense_attention(sequence, SCORES, window) for sequence in (decode, chunk)])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_half_precision_caches_stay_within_their_rounding(heads: tuple[int, int]) -> None:
    torch.manual_seed(2)
    shapes = [(1, 17), (1, 256), (9, 40), (16, 16)]
    sequences = [make_sequence(query, total, heads, 8, torch.bfloat16) for query, total in shapes]
    check(sequences, 16, tolerance=3e-2)


def test_a_row_does_not_depend_on_the_sequences_beside_it() -> None:
    torch.manual_seed(3)
    shapes = [(1, 17), (5, 21), (1, 40), (1, 200), (8, 8)]
    together = [make_sequence(query, total, (4, 2), 8, torch.float32) for query, total in shapes]
    rows = attend(together, 16, SCORES).split([query for query, _ in shapes])
    for sequence, beside_others in zip(together, rows, strict=True):
        sequence.blocks.clear()
        torch.testing.assert_close(attend([sequence], 16, SCORES), beside_others, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_writing_keys_and_values_touches_their_slots_only(block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    num_blocks = 128 // block_size
    key_cache = torch.full((num_blocks, block_size, 2, 4), CANARY, dtype=dtype)
    value_cache = torch.full((num_blocks, block_size, 2, 4), -CANARY, dtype=dtype)
    slots = torch.randperm(128)[:50]
    key, value = torch.randn(50, 2, 4).to(dtype), torch.randn(50, 2, 4).to(dtype)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    for cache, written, canary in ((key_cache, key, CANARY), (value_cache, value, -CANARY)):
        expected = torch.full((128, 2, 4), canary, dtype=dtype)
        for row, slot in enumerate(slots.tolist()):
            expected[slot] = written[row]
        assert torch.equal(cache.view(128, 2, 4), expected)


def test_keys_may_be_written_from_a_view_of_the_fused_projection() -> None:
    torch.manual_seed(5)
    fused = torch.randn(6, 8, 4)
    caches = torch.zeros(4, 4, 2, 4), torch.zeros(4, 4, 2, 4)
    slots = torch.tensor([15, 0, 7, 3, 9, 4])
    ops.write_kv(fused[:, 4:6], fused[:, 6:], *caches, slots)
    assert torch.equal(caches[0].view(16, 2, 4)[slots], fused[:, 4:6])
    assert torch.equal(caches[1].view(16, 2, 4)[slots], fused[:, 6:])


@pytest.mark.parametrize("window", [None, 1, 8, 300])
@pytest.mark.parametrize("kind", ["plain", *KINDS_OF_SCORES])
def test_packed_sequences_are_attended_each_for_itself(kind: str, window: int | None) -> None:
    torch.manual_seed(9)
    lengths = [1, 17, 8, 40]
    scores = ops.AttentionScores(scale=0.35, **KINDS_OF_SCORES.get(kind, {}))
    sequences = [make_sequence(length, length, (6, 2), 8, torch.float32) for length in lengths]
    query, key, value = (
        torch.cat([getattr(sequence, name) for sequence in sequences]).requires_grad_()
        for name in ("query", "key", "value")
    )
    plan = ops.plan_packed_attention(lengths, window=window, device=torch.device("cpu"))
    got = ops.packed_attention(query, key, value, plan, scores)
    expected = torch.cat([dense_attention(sequence, scores, window) for sequence in sequences])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    got.square().sum().backward()
    assert key.grad is not None
    assert value.grad is not None
    assert value.grad.abs().max() > 0
