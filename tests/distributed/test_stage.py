"""A stage computes each step once, in order, and none of another epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm import EngineConfig
from graftlm.distributed.messages import StagePlan, StageStep, StepKey
from graftlm.distributed.stage import Stage, StepRefused
from graftlm.engine.block_pool import BlockId
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.models.layer_span import LayerSpan
from tests.distributed.rig import NUM_LAYERS


@pytest.fixture
def stage(base: Path) -> Stage:
    span = LayerSpan(start=0, stop=2, num_layers=NUM_LAYERS)
    stage = Stage(StagePlan(config=EngineConfig(model=base, workers=2), span=span, num_blocks=(4,)))
    stage.begin(3)
    return stage


def step(epoch: int, number: int, start: int = 0) -> StageStep:
    sequence = ScheduledSequence(
        request_id="a",
        adapter_digest=None,
        token_ids=(1, 2, 3),
        start=start,
        active_from=0,
        prompt_len=6,
        sequence_len=6,
        block_tables=((BlockId(0),),),
        num_logits=0,
    )
    return StageStep(key=StepKey(epoch=epoch, number=number), sequences=(sequence,), is_first=True)


def test_steps_follow_each_other(stage: Stage) -> None:
    first, second = stage.step(step(3, 1), None), stage.step(step(3, 2, start=3), None)
    assert (first.key.number, second.key.number) == (1, 2)
    assert first.output.shape == second.output.shape == (3, 64)


def test_the_last_step_again_gets_the_same_answer(stage: Stage) -> None:
    assert stage.step(step(3, 1), None) is stage.step(step(3, 1), None)


@pytest.mark.parametrize(("epoch", "number"), [(2, 1), (4, 1), (3, 2), (3, 0)])
def test_any_other_step_is_refused(stage: Stage, epoch: int, number: int) -> None:
    with pytest.raises(StepRefused):
        stage.step(step(epoch, number), None)


def test_an_epoch_that_is_over_is_over(stage: Stage) -> None:
    stage.step(step(3, 1), None)
    stage.begin(4)
    for number in (1, 2):
        with pytest.raises(StepRefused):
            stage.step(step(3, number), None)
    assert stage.step(step(4, 1), None).key == StepKey(epoch=4, number=1)
