"""Computations that are recorded and played back, on every level of the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graftlm.kernels.kernel_set import Kernels, NotRecordable, RecordableLoraPlan, RecordablePlan, Recorder
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.lora import AdapterRows, LoraExpand, LoraUpdate, LoraUpdates

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 8, 4
HIDDEN = HEADS * HEAD_DIM
SCORES = AttentionScores(scale=0.3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def recorder(kernels: Kernels) -> Recorder:
    assert kernels.new_recorder is not None
    return kernels.new_recorder()


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kernels: Kernels, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Calls of most kinds, of which some results take the memory of earlier ones. [T, HIDDEN] -> the same."""
    shapes = [(HEADS * HEAD_DIM, HIDDEN), (2 * KV_HEADS * HEAD_DIM, HIDDEN), (96, HIDDEN), (HIDDEN, 48)]
    query, key_value, gate_up, down = (
        kernels.pack(noise(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(shapes)
    )
    gain, bias = noise(HIDDEN, seed=4, dtype=dtype), noise(HIDDEN, seed=5, dtype=dtype)
    angles = noise(3, 1, HEAD_DIM // 2, seed=6, dtype=dtype), noise(3, 1, HEAD_DIM // 2, seed=7, dtype=dtype)
    assert query is not None
    assert key_value is not None
    assert gate_up is not None
    assert down is not None

    def compute(x: Tensor) -> Tensor:
        normed = kernels.rms_norm(x, gain, 1e-5)
        joined = kernels.join_columns([query.linear(normed, None), key_value.linear(normed, None)])
        heads = joined.view(3, -1, HEAD_DIM)[:, :HEADS]
        heads = kernels.apply_rotary(kernels.rms_norm(heads, None, 1e-6), *angles)
        total, normed = kernels.add_rms_norm(heads.reshape(3, HIDDEN), x, gain, 1e-5)
        branch = down.linear(kernels.gated_activation(gate_up.linear(normed, None), "silu"), bias)
        return kernels.add(kernels.layer_norm(kernels.activate(branch, "relu"), gain, bias, 1e-5), total)

    return compute


@DTYPES
@torch.inference_mode()
def test_a_recording_computes_from_what_is_in_its_inputs_now(
    kernels: Kernels, recorder: Recorder, dtype: torch.dtype
) -> None:
    compute = layer(kernels, dtype)
    x, other = noise(3, HIDDEN, seed=8, dtype=dtype), noise(3, HIDDEN, seed=9, dtype=dtype)
    expected, expected_of_other = compute(x.clone()), compute(other.clone())
    assert not torch.equal(expected, expected_of_other)
    recording = recorder.record([x], lambda inputs: compute(compute(inputs[0])))
    assert torch.equal(recording.result, compute(expected))
    assert torch.equal(recording.play([other]), compute(expected_of_other))


@torch.inference_mode()
def test_recordings_that_share_memory_are_played_in_turn(kernels: Kernels, recorder: Recorder) -> None:
    once = layer(kernels, torch.float32)
    x, other = (noise(3, HIDDEN, seed=seed) for seed in (8, 9))
    single = recorder.record([x], lambda inputs: once(inputs[0]))
    double = recorder.record([x], lambda inputs: once(once(inputs[0])))
    for given in (x, other, x):
        assert torch.equal(single.play([given]), once(given.clone()))
        assert torch.equal(double.play([given]), once(once(given.clone())))


@DTYPES
@torch.inference_mode()
def test_sequences_in_other_places_take_the_place_of_those_recorded(
    kernels: Kernels, recorder: Recorder, dtype: torch.dtype
) -> None:
    caches = [noise(6, BLOCK_SIZE, KV_HEADS, HEAD_DIM, seed=seed, dtype=dtype) for seed in (1, 2)]
    query = noise(2, HEADS, HEAD_DIM, seed=3, dtype=dtype)

    def plan(total_lens: list[int], block_tables: list[list[int]]) -> RecordablePlan:
        made = kernels.plan_attention(
            [1, 1], total_lens, block_tables, block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        assert isinstance(made, RecordablePlan)
        return made

    first, second = plan([3, 6], [[0], [1, 2]]), plan([11, 2], [[5, 3, 4], [0]])
    assert first.layout == second.layout
    held = first.held()
    recording = recorder.record([query], lambda inputs: kernels.paged_attention(inputs[0], *caches, held, SCORES))
    for other in (first, second, first):
        held.memory.take_over(other.memory)
        assert torch.equal(recording.play([query]), kernels.paged_attention(query, *caches, other, SCORES))
    assert not torch.equal(
        kernels.paged_attention(query, *caches, first, SCORES), kernels.paged_attention(query, *caches, second, SCORES)
    )


def adapter(rank: int, seed: int, layers: tuple[str, ...] = ("up",)) -> LoraUpdates:
    expand = LoraExpand(matrix=noise(rank, 24, seed=seed), out_start=0, out_stop=24, rank_start=0, rank_stop=rank)
    update = LoraUpdate(shrink=noise(16, rank, seed=seed + 1), expands=(expand,))
    return LoraUpdates(by_layer=dict.fromkeys(layers, update))


@torch.inference_mode()
def test_other_adapters_take_the_place_of_those_recorded(kernels: Kernels, recorder: Recorder) -> None:
    """More or fewer of them, up to the next power of two, of other ranks and on other rows."""
    one, two, three, four = (adapter(rank, 10 * rank) for rank in (3, 5, 8, 16))
    x, base = noise(9, 16, seed=1), torch.zeros(9, 24)

    def plan(*rows: tuple[int, int, LoraUpdates]) -> RecordableLoraPlan:
        made = kernels.plan_lora([AdapterRows(*each) for each in rows], None)
        assert isinstance(made, RecordableLoraPlan)
        return made

    def add(out: Tensor, own: RecordableLoraPlan) -> Tensor:
        segments = own.segments("up")
        assert segments is not None
        kernels.lora(out, x, segments)
        return out

    plans = [
        plan((0, 2, one), (4, 5, two), (5, 9, three)),
        plan((0, 1, four), (1, 2, three), (2, 3, two), (3, 9, one)),
        plan((1, 9, four), (0, 1, one), (9, 9, two)),
    ]
    assert len({each.layout for each in plans}) == 1
    assert plan((0, 9, one)).layout != plans[0].layout
    held = plans[0].held()
    recording = recorder.record([base], lambda inputs: add(inputs[0], held))
    for other in (*plans, plans[0]):
        held.memory.take_over(other.memory)
        expected = add(base.clone(), other)
        assert torch.equal(recording.play([base]), expected)
        assert expected.abs().max() > 1


@torch.inference_mode()
def test_plans_that_change_other_layers_have_other_layouts(kernels: Kernels) -> None:
    both, one = adapter(4, 1, ("up", "down")), adapter(4, 1)
    plans = [kernels.plan_lora([AdapterRows(0, 1, updates)], None) for updates in (both, one)]
    layouts = {plan.layout for plan in plans if isinstance(plan, RecordableLoraPlan)}
    assert len(layouts) == 2


NOT_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.mul": lambda x: x * 2,
    "aten.add_": lambda x: x.add_(1),
    "aten.clone": lambda x: x.t().contiguous(),
    "aten.item": lambda x: x[: int(x[0, 0].item())],
    "aten.empty_like": torch.empty_like,
}


@pytest.mark.parametrize("operation", NOT_CALLS)
@torch.inference_mode()
def test_what_torch_computes_cannot_be_recorded(kernels: Kernels, recorder: Recorder, operation: str) -> None:
    x = noise(3, HIDDEN, seed=1)
    with pytest.raises(NotRecordable):
        recorder.record([x], lambda inputs: kernels.add(NOT_CALLS[operation](inputs[0]), x))
    recording = recorder.record([x], lambda inputs: kernels.rms_norm(inputs[0], None, 1e-5))
    assert torch.equal(recording.result, kernels.rms_norm(x, None, 1e-5))
