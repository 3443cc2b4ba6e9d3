"""Low-rank updates of several segments against dense products in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

IN, OUT = 24, 40


def make_segment(start: int, stop: int, parts: list[tuple[int, int, int]]) -> ops.LoraSegment:
    """parts: (rank, out_start, out_stop) of each expand."""
    expands = []
    rank_start = 0
    for rank, out_start, out_stop in parts:
        expands.append(
            ops.LoraExpand(
                matrix=torch.randn(rank, out_stop - out_start),
                out_start=out_start,
                out_stop=out_stop,
                rank_start=rank_start,
                rank_stop=rank_start + rank,
            )
        )
        rank_start += rank
    update = ops.LoraUpdate(shrink=torch.randn(IN, rank_start), expands=tuple(expands))
    return ops.LoraSegment(start, stop, update)


def dense_update(out: Tensor, x: Tensor, segments: list[ops.LoraSegment]) -> Tensor:
    """The same rule with one full [OUT, IN] matrix per segment."""
    result = out.double().clone()
    for segment in segments:
        delta = torch.zeros(OUT, IN, dtype=torch.float64)
        for expand in segment.update.expands:
            shrink = segment.update.shrink[:, expand.rank_start : expand.rank_stop].double()
            delta[expand.out_start : expand.out_stop] += (shrink @ expand.matrix.double()).T
        for row in range(segment.start, segment.stop):
            result[row] += delta @ x[row].double()
    return result


def updated(out: Tensor, x: Tensor, segments: list[ops.LoraSegment]) -> Tensor:
    result = out.clone()
    ops.lora(result, x, segments)
    return result


def outside(num_rows: int, segments: list[ops.LoraSegment]) -> list[int]:
    inside = {row for segment in segments for row in range(segment.start, segment.stop)}
    return [row for row in range(num_rows) if row not in inside]


def test_segments_of_different_ranks_and_parts_share_a_batch() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(12, IN), torch.randn(12, OUT)
    segments = [
        make_segment(1, 3, [(4, 0, OUT)]),
        make_segment(3, 4, [(1, 0, 16), (8, 16, 28), (3, 28, 40)]),
        make_segment(7, 12, [(64, 28, 40)]),
    ]
    got = updated(out, x, segments)
    torch.testing.assert_close(got.double(), dense_update(out, x, segments), atol=1e-4, rtol=1e-5)
    rows = outside(12, segments)
    assert torch.equal(got[rows], out[rows])
    # A part that no expand writes keeps its bits, too.
    assert torch.equal(got[7:12, :28], out[7:12, :28])


@pytest.mark.parametrize("seed", range(10))
def test_random_segments_match_the_dense_product(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_rows = rng.randint(1, 30)
    cuts = sorted(rng.sample(range(num_rows + 1), min(num_rows + 1, 2 * rng.randint(1, 4)))) if num_rows > 2 else [0, 1]
    segments = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        edges = sorted(rng.sample(range(OUT + 1), 2 * rng.randint(1, 3)))
        parts = [(rng.randint(1, 20), low, high) for low, high in zip(edges[::2], edges[1::2], strict=True)]
        segments.append(make_segment(start, stop, parts))
    x, out = torch.randn(num_rows, IN), torch.randn(num_rows, OUT)
    got = updated(out, x, segments)
    torch.testing.assert_close(got.double(), dense_update(out, x, segments), atol=1e-4, rtol=1e-5)
    rows = outside(num_rows, segments)
    assert torch.equal(got[rows], out[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_base_and_float32_factors_round_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, out = torch.randn(6, IN).to(dtype), torch.randn(6, OUT).to(dtype)
    segments = [make_segment(0, 2, [(8, 0, OUT)]), make_segment(3, 6, [(2, 8, 24)])]
    got = updated(out, x, segments)
    # The exact sum, rounded once. Rounding the update first and the sum again misses this for many entries.
    once = dense_update(out, x, segments).float().to(dtype)
    twice = (out + (dense_update(out, x, segments) - out.double()).to(dtype)).to(dtype)
    assert got.dtype == dtype
    assert (got == once).double().mean() > 0.995
    assert (twice == once).double().mean() < 0.95
    assert torch.equal(got[2], out[2])


def test_no_segments_change_nothing() -> None:
    out = torch.randn(3, OUT)
    assert torch.equal(updated(out, torch.randn(3, IN), []), out)
