"""Every C++ function gives what its twin in torch gives, on every level that this machine runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.kernels.cpu.backend import cpu_kernels
from graftlm.kernels.cpu.library import LEVELS, Level, open_library, runnable_levels
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.ops import (
    AdapterRows,
    AttentionScores,
    LoraExpand,
    LoraSegment,
    LoraUpdate,
    LoraUpdates,
    TokenDraw,
)
from graftlm.kernels.registry import DETERMINISTIC, REFERENCE

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(params=LEVELS, scope="module")
def deterministic_kernels(request: pytest.FixtureRequest) -> Kernels:
    """As `kernels`, with the same bits in any batch."""
    level: Level = request.param if request.param in runnable_levels() else "portable"
    return cpu_kernels(open_library(level), DETERMINISTIC, deterministic=True)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_like(out: Tensor, expected: Tensor) -> None:
    """Within rounding, relative to the largest value."""
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    scale = 1 + expected.float().abs().max()
    assert (out.float() - expected.float()).abs().max() <= TOLERANCES[expected.dtype] * scale


def test_this_machine_runs_a_kernel_library() -> None:
    assert "portable" in runnable_levels()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 33, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 32), (48, 64), (1, 1), (50, 33), (129, 100), (15, 257)])
def test_a_packed_matrix_multiplies_as_linear_does(
    kernels: Kernels, dtype: torch.dtype, rows: int, out_features: int, in_features: int
) -> None:
    weight, x = noise(out_features, in_features, dtype=dtype), noise(rows, in_features, dtype=dtype, seed=1)
    bias = noise(out_features, dtype=dtype, seed=2)
    packed = kernels.pack(weight)
    assert packed is not None
    assert_like(packed.linear(x, bias), (x.double() @ weight.double().t() + bias.double()).to(dtype))
    assert_like(packed.linear(x, None), (x.double() @ weight.double().t()).to(dtype))
    assert torch.equal(packed.rows(torch.arange(out_features)), weight)
    y = noise(rows, out_features, dtype=dtype, seed=3)
    assert_like(packed.turned_linear(y), (y.double() @ weight.double()).to(dtype))


def test_more_rows_than_are_turned_at_once_add_up(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, y = noise(4100, 20, dtype=dtype), noise(3, 4100, dtype=dtype, seed=1)
    packed = kernels.pack(weight)
    assert packed is not None
    assert_like(packed.turned_linear(y), (y.double() @ weight.double()).to(dtype))


def test_more_rows_than_the_cache_holds_are_multiplied_in_blocks(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, x = noise(20, 2600, dtype=dtype), noise(600, 2600, dtype=dtype, seed=1)
    packed = kernels.pack(weight)
    assert packed is not None
    together = packed.linear(x, None)
    assert_like(together, (x.double() @ weight.double().t()).to(dtype))
    assert torch.equal(packed.linear(x[250:290], None), together[250:290])


def test_a_row_of_a_product_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype) -> None:
    packed = kernels.pack(noise(80, 96, dtype=dtype))
    assert packed is not None
    x = noise(70, 96, dtype=dtype, seed=1)
    together = packed.linear(x, None)
    for start, stop in ((0, 1), (5, 6), (3, 8), (0, 33), (16, 70)):
        assert torch.equal(packed.linear(x[start:stop], None), together[start:stop])
    y = noise(70, 80, dtype=dtype, seed=2)
    turned = packed.turned_linear(y)
    for start, stop in ((0, 1), (3, 8), (0, 33), (16, 70)):
        assert torch.equal(packed.turned_linear(y[start:stop]), turned[start:stop])


def test_a_packed_matrix_takes_rows_with_a_stride(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, wide = noise(20, 32, dtype=dtype), noise(5, 100, dtype=dtype, seed=1)
    packed = kernels.pack(weight)
    assert packed is not None
    assert torch.equal(packed.linear(wide[:, 7:39], None), packed.linear(wide[:, 7:39].contiguous(), None))
    assert torch.equal(packed.turned_linear(wide[:, 7:27]), packed.turned_linear(wide[:, 7:27].contiguous()))
    # As autograd's gradient of a sum has.
    same = wide[:1, :1].expand(5, 20)
    assert torch.equal(packed.turned_linear(same), packed.turned_linear(same.contiguous()))


@pytest.mark.parametrize("widths", [(5,), (16, 1, 33), (64, 192)], ids=str)
def test_columns_are_joined_as_cat_does(kernels: Kernels, dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    wide = noise(7, 300, dtype=dtype)
    parts = [wide[:, width : 2 * width] for width in widths]
    assert torch.equal(kernels.join_columns(parts), torch.cat(parts, dim=1))


@pytest.mark.parametrize("columns", [1, 8, 16, 31, 64, 576])
def test_norms_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    x = noise(5, 3, columns, dtype=dtype) * 3
    weight, bias = noise(columns, dtype=dtype, seed=1), noise(columns, dtype=dtype, seed=2)
    for gain in (None, weight, weight.float()):
        assert_like(kernels.rms_norm(x, gain, 1e-5), REFERENCE.rms_norm(x, gain, 1e-5))
    assert_like(kernels.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5))
    assert_like(kernels.layer_norm(x, None, None, 1e-5), REFERENCE.layer_norm(x, None, None, 1e-5))


@pytest.mark.parametrize("columns", [1, 16, 31, 576])
def test_the_norm_of_a_sum_is_that_of_torch(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    branch, residual = noise(7, columns, dtype=dtype) * 3, noise(7, columns, dtype=dtype, seed=3)
    weight, bias = noise(columns, dtype=dtype, seed=1), noise(columns, dtype=dtype, seed=2)
    for gain in (None, weight, weight.float()):
        total, normed = kernels.add_rms_norm(branch.clone(), residual, gain, 1e-5)
        # The sum is rounded as torch rounds it, so the norm is that of the same numbers.
        assert torch.equal(total, branch + residual)
        assert torch.equal(normed, kernels.rms_norm(branch + residual, gain, 1e-5))
        assert_like(normed, REFERENCE.add_rms_norm(branch, residual, gain, 1e-5)[1])
    for own in ((weight, bias), (None, None)):
        total, normed = kernels.add_layer_norm(branch.clone(), residual, *own, 1e-5)
        assert torch.equal(total, branch + residual)
        assert torch.equal(normed, kernels.layer_norm(branch + residual, *own, 1e-5))
        assert_like(normed, REFERENCE.add_layer_norm(branch, residual, *own, 1e-5)[1])


def test_what_needs_a_gradient_is_not_written_to(kernels: Kernels) -> None:
    branch, residual = noise(3, 8), noise(3, 8, seed=1).requires_grad_()
    before = branch.clone()
    total, normed = kernels.add_rms_norm(branch, residual, None, 1e-5)
    (total + normed).sum().backward()
    assert torch.equal(branch, before)
    assert residual.grad is not None
    weight = noise(8, seed=2).requires_grad_()
    (kernels.rms_norm(branch, weight, 1e-5) + kernels.add_rms_norm(branch, before, weight, 1e-5)[1]).sum().backward()
    assert torch.equal(branch, before)
    assert weight.grad is not None


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_activations_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, activation: ops.Activation) -> None:
    x = noise(7, 2 * 13, dtype=dtype) * 5
    assert_like(kernels.gated_activation(x.clone(), activation), REFERENCE.gated_activation(x.clone(), activation))
    extremes = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 300.0, -300.0, 1e30, -1e30, torch.inf, 0.5, 9.1, -3.3]
    x = torch.tensor([extremes], dtype=dtype)
    out, expected = kernels.activate(x.clone(), activation), REFERENCE.activate(x.clone(), activation)
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True)
    broken = torch.full((1, 4), torch.nan, dtype=dtype)
    assert kernels.activate(broken, activation).isnan().all()


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (32, 16), (20, 20), (6, 4)])
def test_rotation_is_that_of_torch(kernels: Kernels, dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    fused = noise(5, 3 * head_dim + 7, dtype=dtype)
    x = fused[:, 7:].view(5, 3, head_dim)
    angle = noise(5, 1, rotated // 2, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert_like(kernels.apply_rotary(x, cos, sin), REFERENCE.apply_rotary(x, cos, sin))


def updates(dtype: torch.dtype, ranks: Sequence[int], in_features: int, widths: Sequence[int]) -> LoraUpdate:
    """One pair per output part, one after the other; the last part has a second pair."""
    expands, rank_start, out_start = [], 0, 0
    for index, (rank, width) in enumerate(zip([*ranks, ranks[-1]], [*widths, widths[-1]], strict=True)):
        out_start -= widths[-1] if index == len(widths) else 0
        expands.append(
            LoraExpand(
                matrix=noise(rank, width, dtype=dtype, seed=index),
                out_start=out_start,
                out_stop=out_start + width,
                rank_start=rank_start,
                rank_stop=rank_start + rank,
            )
        )
        rank_start, out_start = rank_start + rank, out_start + width
    return LoraUpdate(shrink=noise(in_features, rank_start, dtype=dtype, seed=9), expands=tuple(expands))


@pytest.mark.parametrize("ranks", [(4, 8, 3), (16, 16, 16), (1, 64, 5)])
def test_low_rank_updates_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, ranks: Sequence[int]) -> None:
    x, base = noise(100, 70, dtype=dtype), noise(100, 300, dtype=dtype, seed=1)
    exact = updates(torch.float32, ranks, 70, (270, 13, 17))
    other = updates(torch.float32, ranks[::-1], 70, (270, 13, 17))
    segments = [
        LoraSegment(0, 1, exact),
        LoraSegment(2, 9, other),
        LoraSegment(9, 20, exact),
        LoraSegment(20, 63, other),
        LoraSegment(64, 100, updates(torch.bfloat16, ranks, 70, (270, 13, 17))),
    ]
    out, expected = base.clone(), base.clone()
    kernels.lora(out, x, segments)
    REFERENCE.lora(expected, x, segments)
    assert_like(out, expected)
    assert (out.float() - base.float()).abs().max() > 1
    assert torch.equal(out[[1, 63]], base[[1, 63]])
    wide, expected = base.float(), base.float()
    kernels.lora(wide, x, segments)
    REFERENCE.lora(expected, x, segments)
    assert_like(wide.to(dtype), expected.to(dtype))


def test_updates_kept_in_bfloat16_are_computed_as_in_float32(kernels: Kernels) -> None:
    kept = updates(torch.bfloat16, (8, 8, 8), 40, (64, 32, 32))
    exact = LoraUpdate(
        shrink=kept.shrink.float(),
        expands=tuple(
            LoraExpand(
                matrix=expand.matrix.float(),
                out_start=expand.out_start,
                out_stop=expand.out_stop,
                rank_start=expand.rank_start,
                rank_stop=expand.rank_stop,
            )
            for expand in kept.expands
        ),
    )
    x, out, expected = noise(6, 40), torch.zeros(6, 128), torch.zeros(6, 128)
    kernels.lora(out, x, [LoraSegment(0, 6, kept)])
    kernels.lora(expected, x, [LoraSegment(0, 6, exact)])
    assert torch.equal(out, expected)


def test_many_rows_are_updated_to_nearly_the_accuracy_of_float32(kernels: Kernels) -> None:
    update = updates(torch.float32, (16, 8, 3), 70, (270, 13, 17))
    x, out = noise(50, 70, dtype=torch.bfloat16), torch.zeros(50, 300)
    kernels.lora(out, x, [LoraSegment(0, 50, update)])
    expected = torch.zeros(50, 300)
    REFERENCE.lora(expected, x, [LoraSegment(0, 50, update)])
    assert (out - expected).abs().max() <= 3e-5 * expected.abs().max()


def test_a_row_of_an_update_does_not_depend_on_its_segment(deterministic_kernels: Kernels, dtype: torch.dtype) -> None:
    update = updates(torch.float32, (4, 8, 3), 70, (270, 13, 17))
    x, base = noise(20, 70, dtype=dtype), noise(20, 300, dtype=dtype, seed=1)
    together = base.clone()
    deterministic_kernels.lora(together, x, [LoraSegment(0, 20, update)])
    for row in (0, 7, 19):
        alone = base[row : row + 1].clone()
        deterministic_kernels.lora(alone, x[row : row + 1], [LoraSegment(0, 1, update)])
        assert torch.equal(alone[0], together[row])


SCORES = {
    "plain": AttentionScores(scale=0.3),
    "softcap": AttentionScores(scale=0.3, softcap=5.0),
    "alibi": AttentionScores(scale=0.3, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])),
    "sinks": AttentionScores(scale=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0])),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(6, 16), (3, 32), (1, 20), (2, 136), (2, 64), (1, 128)])
def test_attention_is_that_of_torch(
    kernels: Kernels, dtype: torch.dtype, scores: AttentionScores, window: int | None, kv_heads: int, head_dim: int
) -> None:
    query_lens, total_lens, block_size = [1, 1, 5, 40, 1, 150], [1, 100, 5, 90, 257, 150], 16
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    tables, used = [], 0
    for total in total_lens:
        count = -(-total // block_size)
        tables.append(order[used : used + count])
        used += count
    query = noise(sum(query_lens), 6 * head_dim + 5, dtype=dtype)[:, 5:].view(-1, 6, head_dim)
    keys = noise(60, block_size, kv_heads, head_dim, dtype=dtype, seed=2)
    values = noise(60, block_size, kv_heads, head_dim, dtype=dtype, seed=3)

    def attended(chosen: Kernels, exact: bool) -> Tensor:
        plan = chosen.plan_attention(
            query_lens, total_lens, tables, block_size=block_size, window=window, device=torch.device("cpu")
        )
        tensors = [tensor.float() if exact else tensor for tensor in (query, keys, values)]
        return chosen.paged_attention(*tensors, plan, scores)

    assert_like(attended(kernels, exact=False), attended(REFERENCE, exact=True).to(dtype))


@pytest.mark.parametrize("window", [None, 70])
def test_a_position_of_a_chunk_is_the_same_in_any_chunk(
    kernels: Kernels, dtype: torch.dtype, window: int | None
) -> None:
    total, block_size, scores = 150, 16, SCORES["sinks"]
    query = noise(total, 6, 40, dtype=dtype)
    keys, values = noise(12, block_size, 2, 40, dtype=dtype, seed=2), noise(12, block_size, 2, 40, dtype=dtype, seed=3)

    def last(count: int) -> Tensor:
        plan = kernels.plan_attention(
            [count], [total], [range(10)], block_size=block_size, window=window, device=torch.device("cpu")
        )
        return kernels.paged_attention(query[total - count :], keys, values, plan, scores)

    whole = last(total)
    for count in (6, 50, 128, 149):
        assert torch.equal(last(count), whole[total - count :])


def test_keys_are_written_where_their_slots_are(kernels: Kernels, dtype: torch.dtype) -> None:
    fused = noise(4, 3 * 2 * 10, dtype=dtype).view(4, 6, 10)
    slots = torch.tensor([7, 0, 20, 13])
    caches = [torch.zeros(3, 8, 2, 10, dtype=dtype) for _ in range(4)]
    kernels.write_kv(fused[:, 2:4], fused[:, 4:], caches[0], caches[1], slots)
    REFERENCE.write_kv(fused[:, 2:4], fused[:, 4:], caches[2], caches[3], slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (32, 16), (20, 20), (6, 4)])
@pytest.mark.parametrize("order", ["apart", "keys are values", "not in rows"])
def test_rotating_and_writing_at_once_is_the_same(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, rotated: int, order: str
) -> None:
    fused = noise(5, 7 * head_dim + 7, dtype=dtype)[:, 7:].view(5, 7, head_dim)
    query, key, value = fused[:, :3], fused[:, 3:5], fused[:, 5:]
    if order == "keys are values":
        value = key
    if order == "not in rows":
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    angle = noise(5, 1, rotated // 2, seed=1)
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    slots = torch.tensor([7, 0, 20, 13, 23])
    caches = [noise(3, 8, 2, head_dim, dtype=dtype, seed=4) for _ in range(4)]
    expected = kernels.apply_rotary(query, *angles)
    kernels.write_kv(kernels.apply_rotary(key, *angles), value, caches[2], caches[3], slots)
    assert_like(kernels.rotate_and_write(query, key, value, *angles, *caches[:2], slots), expected)
    assert_like(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_float16_is_left_to_torch(kernels: Kernels) -> None:
    x = noise(3, 8, dtype=torch.float16)
    assert kernels.pack(x) is None
    assert torch.equal(kernels.rms_norm(x, None, 1e-5), REFERENCE.rms_norm(x, None, 1e-5))
    total, normed = kernels.add_rms_norm(x.clone(), x, None, 1e-5)
    assert torch.equal(total, x + x)
    assert torch.equal(normed, REFERENCE.rms_norm(x + x, None, 1e-5))
    draw = TokenDraw(seed=1, answer=0, position=0, temperature=1.0, top_p=0.9, min_p=0.0, top_k=0)
    assert kernels.draw_tokens(x, [draw] * 3) == REFERENCE.draw_tokens(x, [draw] * 3)


def test_updates_that_are_planned_for_all_layers_are_those_of_each(kernels: Kernels, dtype: torch.dtype) -> None:
    first, second = updates(torch.float32, (4, 8, 3), 70, (270, 13, 17)), updates(torch.float32, (2,), 70, (300,))
    adapters = [
        AdapterRows(1, 4, LoraUpdates(by_layer={"one": first, "two": second})),
        AdapterRows(4, 5, LoraUpdates(by_layer={})),
        AdapterRows(5, 9, LoraUpdates(by_layer={"two": first, "three": second})),
    ]
    expected = {
        "one": [LoraSegment(1, 4, first)],
        "two": [LoraSegment(1, 4, second), LoraSegment(5, 9, first)],
        "three": [LoraSegment(5, 9, second)],
    }
    x, base = noise(10, 70, dtype=dtype), noise(10, 300, dtype=dtype, seed=1)
    for layers in (None, ["two", "nobody's", "three"]):
        # The second time what is known of the adapters is used again.
        for plan in (kernels.plan_lora(adapters, layers), kernels.plan_lora(adapters[::2], layers)):
            for layer in layers or expected:
                planned = plan.segments(layer)
                assert (planned is None) == (layer not in expected)
                if planned is not None:
                    out, alone = base.clone(), base.clone()
                    kernels.lora(out, x, planned)
                    kernels.lora(alone, x, expected[layer])
                    assert torch.equal(out, alone)
                    assert [(start, stop) for start, stop, _ in planned] == [own[:2] for own in expected[layer]]
    assert REFERENCE.plan_lora(adapters, None).segments("two") == expected["two"]
    nothing = [AdapterRows(0, 1, LoraUpdates(by_layer={}))]
    assert kernels.plan_lora(nothing, []).segments("one") is None
    assert kernels.plan_lora(nothing, None).segments("nobody's") is None


def test_plans_with_what_the_library_does_not_take_are_carried_out(kernels: Kernels) -> None:
    update = updates(torch.float64, (4,), 70, (300,))
    plan = kernels.plan_lora([AdapterRows(1, 4, LoraUpdates(by_layer={"one": update}))], None)
    x, out = noise(5, 70), noise(5, 300, seed=1)
    expected = out.clone()
    planned = plan.segments("one")
    assert planned is not None
    kernels.lora(out, x, planned)
    REFERENCE.lora(expected, x, [LoraSegment(1, 4, update)])
    assert torch.equal(out, expected)
