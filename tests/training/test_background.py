"""Training in pieces, between an engine's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.config import EngineConfig
from graftlm.engine.base import Base, load_base
from graftlm.training.background import BackgroundTrainer
from graftlm.training.job import make_job
from graftlm.training.job_run import JobRun
from graftlm.training.pace import Pace
from graftlm.training.trainer import Trainer
from graftlm.training.training import prepare_job, start_run
from tests.training.peft_loop import completion_rows, write_rows
from tests.training.test_preference import ROWS


@pytest.fixture(scope="module")
def base(llama: Path) -> Base:
    return load_base(EngineConfig(model=llama, dtype="float32"))


def run_of(base: Base, folder: Path, **settings: Any) -> JobRun:
    rows = ROWS if settings.get("objective") == "dpo" else completion_rows()
    data = write_rows(folder.parent / f"{folder.name}.jsonl", rows)
    job = make_job({"data": data, "output": folder, "steps": 3, "lr": 1e-2, "rank": 4, **settings})
    return start_run(prepare_job(job, base, "base"), base, resume=False)


def losses_of(trainer: Trainer, run: JobRun) -> list[float]:
    trainer.add(run)
    losses: list[float] = []
    trainer.train(report=lambda run: losses.append(run.last_metrics["loss"]), is_stopped=lambda: False)
    return losses


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_small_passes_have_the_losses_of_large_ones(base: Base, tmp_path: Path, objective: str) -> None:
    """A pace that nothing fits into leaves one example for each pass."""
    # Adam makes of a gradient's rounding a step as long as the learning rate.
    settings = {"objective": objective, "eval_fraction": 0.25, "eval_every": 1, "lr": 2e-3}
    slow, fast = (run_of(base, tmp_path / name, **settings) for name in ("slow", "fast"))
    expected = losses_of(Trainer(base.decoder), fast)
    # A preference compares sums over whole documents, and float32 has seven digits.
    tolerance = 1e-5 if objective == "dpo" else 2e-6
    assert losses_of(Trainer(base.decoder, pace=Pace(1e-9)), slow) == pytest.approx(expected, abs=tolerance)
    assert slow.last_metrics["eval_loss"] == pytest.approx(fast.last_metrics["eval_loss"], abs=tolerance)


def test_the_pace_follows_what_passes_cost() -> None:
    pace = Pace(0.5)
    assert not pace.fits(1)
    pace.record(100, 1.0)
    assert (pace.max_rows, pace.fits(50), pace.fits(51)) == (50, True, False)
    for _ in range(30):
        pace.record(100, 0.1)
    assert pace.max_rows == pytest.approx(500, abs=2)


def test_an_update_waits_while_requests_would_wait_for_it(base: Base, tmp_path: Path) -> None:
    reports: list[int] = []
    trainer = BackgroundTrainer(base.decoder, max_pause_seconds=1e-9, wake=lambda: None)
    assert not trainer.has_work
    trainer.add(run_of(base, tmp_path / "job", steps=2), lambda run: reports.append(run.step))
    for _ in range(50):
        trainer.step(is_serving=True)
    assert trainer.has_work
    assert reports == []
    while trainer.has_work:
        trainer.step(is_serving=False)
    assert reports == [1, 2]
    assert (tmp_path / "job" / "adapter_config.json").exists()


def test_an_update_goes_on_between_steps_if_its_passes_are_short(base: Base, tmp_path: Path) -> None:
    trainer = BackgroundTrainer(base.decoder, max_pause_seconds=60, wake=lambda: None)
    run = run_of(base, tmp_path / "job", steps=2)
    trainer.add(run, lambda run: None)
    # What a pass costs is not known before there was one.
    while run.step == 0:
        trainer.step(is_serving=False)
    while trainer.has_work:
        trainer.step(is_serving=True)
    assert run.state == "finished"


def test_a_pass_that_breaks_ends_its_jobs_and_no_later_ones(base: Base, tmp_path: Path) -> None:
    trainer = BackgroundTrainer(base.decoder, max_pause_seconds=60, wake=lambda: None)
    broken, well = run_of(base, tmp_path / "broken"), run_of(base, tmp_path / "well")
    for parameter in broken.trainable.parameters.values():
        parameter.data = torch.zeros(3, 3)
    states: list[str] = []
    trainer.add(broken, lambda run: states.append(run.state))
    while trainer.has_work:
        trainer.step(is_serving=False)
    assert states == ["failed"]
    trainer.add(well, lambda run: None)
    while trainer.has_work:
        trainer.step(is_serving=False)
    assert well.state == "finished"


def test_what_has_not_ended_is_saved_and_goes_on(base: Base, tmp_path: Path) -> None:
    straight = run_of(base, tmp_path / "straight")
    expected = losses_of(Trainer(base.decoder), straight)
    trainer = BackgroundTrainer(base.decoder, max_pause_seconds=60, wake=lambda: None)
    stopped = run_of(base, tmp_path / "stopped")
    trainer.add(stopped, lambda run: None)
    while stopped.step == 0:
        trainer.step(is_serving=False)
    trainer.step(is_serving=False)
    trainer.save()
    job = stopped.job
    resumed = start_run(prepare_job(job, base, "base"), base, resume=True)
    assert (resumed.step, resumed.num_tokens) == (1, stopped.num_tokens)
    assert losses_of(Trainer(base.decoder), resumed) == pytest.approx(expected[1:], abs=2e-6)
    assert resumed.num_tokens == straight.num_tokens
