"""Steps that are played back from a recording, beside the same steps computed as they come: to the bit."""

from __future__ import annotations

import gc
import logging
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftlm.adapters import AdapterWeights
from graftlm.checkpoint import open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import load_decoder
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.engine.span_runner import SpanRunner
from graftlm.kernels.kernel_set import Kernels, Recorder, Recording
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.kernels.registry import choose_kernels
from graftlm.layers import recorded_blocks
from graftlm.layers.patch import LinearPatch, ModelPatch, NormPatch
from graftlm.models.decoder import Decoder
from tests.parity.family_cases import FAMILY_CASES
from tests.tiny import make_model

BLOCK_SIZE = 16
# Of each sequence, and of all.
BLOCKS, NUM_BLOCKS = 10, 300


class CountingRecorder:
    """Counts what it has another record."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.count = 0

    def record(self, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], Tensor]) -> Recording:
        self.count += 1
        return self._recorder.record(inputs, compute)


class Rig:
    """One decoder with two caches: one whose steps are recorded, and one without."""

    def __init__(self, folder: Path) -> None:
        kernels = choose_kernels(torch.device("cpu"), deterministic=False)
        assert kernels.new_recorder is not None
        self.recorder = CountingRecorder(kernels.new_recorder())
        self.decoder = load(folder, kernels)
        sets = replace(kernels, new_recorder=lambda: self.recorder), replace(kernels, new_recorder=None)
        num_blocks = [NUM_BLOCKS] * len(self.decoder.windows)
        self._recorded, self._plain = (
            SpanRunner(self.decoder, num_blocks=num_blocks, block_size=BLOCK_SIZE, kernels=own) for own in sets
        )
        self._lens: dict[str, int] = {}

    def step(self, rows: Sequence[tuple[str, int, AdapterWeights | None]]) -> Tensor:
        """Some tokens more of each sequence: (its name, how many, its adapter) -> logits of each's last."""
        adapters = {str(id(adapter)): adapter for _, _, adapter in rows if adapter is not None}
        sequences = [self._sequence(*row) for row in rows]
        logits = self._recorded.run(sequences, adapters)
        assert torch.equal(logits, self._plain.run(sequences, adapters))
        return logits

    def _sequence(self, name: str, count: int, adapter: AdapterWeights | None) -> ScheduledSequence:
        start = self._lens.get(name, 0)
        self._lens[name] = start + count
        place = list(self._lens).index(name)
        return ScheduledSequence(
            request_id=name,
            adapter_digest=None if adapter is None else str(id(adapter)),
            token_ids=tuple((7 * position + 31 * place) % 250 for position in range(start, start + count)),
            start=start,
            active_from=0,
            prompt_len=start + count,
            sequence_len=start + count,
            block_tables=tuple(array("q", range(BLOCKS * place, BLOCKS * (place + 1))) for _ in self.decoder.windows),
            num_logits=1,
        )


def load(folder: Path, kernels: Kernels) -> Decoder:
    checkpoint = open_checkpoint(folder)
    try:
        return load_decoder(EngineConfig(model=str(folder)), checkpoint, kernels)
    finally:
        checkpoint.close()


def adapter(decoder: Decoder, seed: int, *, rank: int = 4, every: int = 1) -> AdapterWeights:
    """Loud low-rank updates of each `every`th linear layer."""
    generator = torch.Generator().manual_seed(seed)
    linears = {}
    for slot, linear in list(decoder.linears.items())[::every]:
        columns, rows = linear.weight.shape[1], linear.weight.shape[0]
        matrix = torch.randn(rank, rows, generator=generator) * 0.2
        expand = LoraExpand(matrix=matrix, out_start=0, out_stop=rows, rank_start=0, rank_stop=rank)
        shrink = torch.randn(columns, rank, generator=generator) * 0.2
        linears[slot] = LinearPatch(low_rank=LoraUpdate(shrink=shrink, expands=(expand,)))
    patch = ModelPatch(linears=linears)
    return AdapterWeights(patch=patch, dormant_patch=patch)


@pytest.fixture
def rig(llama: Path) -> Rig:
    return Rig(llama)


def test_a_layout_is_recorded_when_it_comes_again(rig: Rig) -> None:
    rig.step([("a", 3, None), ("b", 5, None)])
    assert rig.recorder.count == 0
    for _ in range(3):
        rig.step([("a", 1, None), ("b", 7, None)])
        rig.step([("c", 4, None), ("d", 4, None)])
        assert rig.recorder.count == 1
    rig.step([("a", 1, None)])
    assert rig.recorder.count == 1


def test_steps_of_many_rows_are_computed_as_they_come(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 64  # Of `make_llama`.
    monkeypatch.setattr(recorded_blocks, "MAX_ELEMENTS", 8 * width)
    for _ in range(2):
        rig.step([("long", 9, None)])
    assert rig.recorder.count == 0
    for _ in range(2):
        rig.step([("long", 8, None)])
    assert rig.recorder.count == 1


def test_other_adapters_are_played_with_what_was_recorded(rig: Rig, llama: Path) -> None:
    red, green = adapter(rig.decoder, 1), adapter(rig.decoder, 2, rank=7)
    without = Rig(llama).step([("a", 4, None), ("b", 4, None)])
    with_red = rig.step([("a", 4, None), ("b", 4, red)])
    assert torch.equal(with_red[0], without[0])
    assert (with_red[1] - without[1]).abs().max() > 0.5
    rig.step([("c", 6, None), ("d", 2, green)])
    assert rig.recorder.count == 1
    rig.step([("a", 2, None), ("e", 6, red)])
    rig.step([("a", 7, green), ("f", 1, None)])
    assert rig.recorder.count == 1
    for _ in range(2):
        rig.step([("a", 4, None), ("g", 4, None)])
    assert rig.recorder.count == 2


def test_the_number_of_adapters_counts_by_powers_of_two(rig: Rig) -> None:
    adapters = [adapter(rig.decoder, seed, rank=seed) for seed in range(1, 6)]
    for count, recordings in ((3, 0), (4, 1), (5, 1), (5, 2), (3, 2), (2, 2), (2, 3), (4, 3)):
        rows = [*adapters[:count], *[None] * (6 - count)]
        rig.step([(f"row {index}", 1, each) for index, each in enumerate(rows)])
        assert rig.recorder.count == recordings


def test_adapters_of_other_layers_are_recorded_apart(rig: Rig) -> None:
    everywhere, here_and_there = adapter(rig.decoder, 1), adapter(rig.decoder, 2, every=3)
    for turn in range(3):
        rig.step([(f"a{turn}", 2, everywhere)])
        rig.step([(f"b{turn}", 2, here_and_there)])
    assert rig.recorder.count == 2


def test_an_adapter_that_does_more_is_computed_as_it_comes(rig: Rig) -> None:
    slot, norm = next(iter(rig.decoder.norms.items()))
    assert norm.weight is not None
    patch = replace(adapter(rig.decoder, 1).patch, norms={slot: NormPatch(weight=norm.weight * 3)})
    for _ in range(3):
        rig.step([("a", 2, AdapterWeights(patch=patch, dormant_patch=patch))])
    assert rig.recorder.count == 0
    for _ in range(2):
        rig.step([("b", 2, None)])
    assert rig.recorder.count == 1


def test_a_recording_keeps_no_adapter(rig: Rig) -> None:
    own = adapter(rig.decoder, 1)
    update = weakref.ref(next(iter(own.patch.linears.values())).low_rank)
    for name in ("a", "b", "c"):
        rig.step([(name, 2, own)])
    del own
    gc.collect()
    assert update() is None
    rig.step([("d", 2, adapter(rig.decoder, 2))])
    assert rig.recorder.count == 1


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "gpt2", "opt", "phi", "bloom"])
def test_families_whose_layers_call_kernels_alone(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graftlm.layers")
    rig = Rig(make_model(tmp_path / "base", FAMILY_CASES[family].config()))
    own = adapter(rig.decoder, 1)
    for _ in range(4):
        rig.step([("a", 1, None), ("b", 1, own), ("c", 1, None)])
    assert caplog.text == ""
    assert rig.recorder.count == 1


def test_a_family_whose_layers_do_more_is_computed_as_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graftlm.layers")
    rig = Rig(make_model(tmp_path / "base", FAMILY_CASES["mixtral"].config()))
    for _ in range(4):
        rig.step([("a", 1, None), ("b", 1, None)])
    assert rig.recorder.count == 1
    assert "steps are not recorded here: the layers call aten." in caplog.text
