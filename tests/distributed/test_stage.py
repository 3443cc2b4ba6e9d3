"""A stage computes each step once, in order, and none of another epoch, and gives again what it gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm import EngineConfig
from graftlm.distributed.messages import StagePlan, StageStep, StepKey
from graftlm.distributed.stage import Stage, StepRefused
from graftlm.engine.block_pool import BlockId
from graftlm.engine.cache_blocks import DROPPED
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.models.layer_span import LayerSpan
from tests.distributed.rig import NUM_LAYERS


@pytest.fixture
def stage(base: Path) -> Stage:
    span = LayerSpan(start=0, stop=2, num_layers=NUM_LAYERS)
    stage = Stage(StagePlan(config=EngineConfig(model=base, workers=2), span=span, num_blocks=(4,)))
    stage.begin(3)
    return stage


def tokens(start: int = 0, block: int = 0) -> ScheduledSequence:
    return ScheduledSequence(
        request_id="a",
        adapter_digest=None,
        token_ids=(1, 2, 3),
        start=start,
        active_from=0,
        prompt_len=6,
        sequence_len=6,
        block_tables=((BlockId(block),),),
        num_logits=0,
    )


def step(epoch: int, number: int, start: int = 0, **parts: Any) -> StageStep:
    fields: dict[str, Any] = {"sequences": (tokens(start),), "after": None, **parts}
    return StageStep(key=StepKey(epoch=epoch, number=number), **fields)


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


def test_what_was_given_is_given_again_behind_what_is_computed_now(stage: Stage) -> None:
    first = stage.step(step(3, 1), None).output.unpack()
    second = stage.step(step(3, 2, start=3, recalled=(tokens(),)), None)
    assert torch.equal(second.output.unpack()[3:], first)
    alone = stage.step(step(3, 3, sequences=(), recalled=(tokens(3), tokens())), None)
    assert torch.equal(alone.output.unpack(), torch.cat([second.output.unpack()[:3], first]))
    assert [reply.reports[-1].num_tokens for reply in (second, alone)] == [3, 0]


def test_what_is_replayed_is_computed_and_given_only_if_it_is_recalled(stage: Stage) -> None:
    first = stage.step(step(3, 1), None)
    again = stage.step(step(3, 2, start=3, replays=(tokens(),)), None)
    assert again.output.shape == (3, 64)
    assert (again.reports[-1].num_tokens, again.reports[-1].num_replayed_tokens) == (6, 3)
    given = stage.step(step(3, 3, sequences=(), replays=(tokens(),), recalled=(tokens(),)), None)
    assert torch.allclose(given.output.unpack(), first.output.unpack(), atol=1e-5)


def test_an_epoch_begins_with_what_the_last_one_has_written(stage: Stage) -> None:
    first = stage.step(step(3, 1), None).output.unpack()
    stage.begin(4)
    recalled = stage.step(step(4, 1, sequences=(), recalled=(tokens(),)), None)
    assert torch.equal(recalled.output.unpack(), first)


@pytest.mark.parametrize(
    "lost", [tokens(3), tokens(block=1), replace(tokens(), block_tables=((DROPPED,),))], ids=["later", "other", "gone"]
)
def test_what_was_not_kept_here_is_not_recalled(stage: Stage, lost: ScheduledSequence) -> None:
    stage.step(step(3, 1), None)
    with pytest.raises(StepRefused, match="not kept"):
        stage.step(step(3, 2, sequences=(), recalled=(lost,)), None)


def test_hidden_states_of_other_tokens_are_refused(base: Path, stage: Stage) -> None:
    before = stage.step(step(3, 1), None)
    span = LayerSpan(start=2, stop=NUM_LAYERS, num_layers=NUM_LAYERS)
    last = Stage(StagePlan(config=EngineConfig(model=base, workers=2), span=span, num_blocks=(4,)))
    last.begin(3)
    with pytest.raises(StepRefused, match="not of these tokens"):
        last.step(step(3, 1, after=before.key, replays=(tokens(3),)), before)
