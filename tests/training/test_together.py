"""Several jobs over one base: each becomes what it would have become alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.checkpoint import open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import Base, load_base
from graftlm.errors import TrainingFailed
from graftlm.models.build import build_decoder
from graftlm.training import TrainingJob, train_together
from graftlm.training.job import make_job
from graftlm.training.job_run import JobRun
from graftlm.training.trainer import Trainer
from graftlm.training.training import prepare_job, start_run
from tests.training.peft_loop import TEXTS, completion_rows, write_rows

STEPS = 40
SETTINGS: dict[str, dict[str, Any]] = {
    "two": {"rank": 2, "lr": 1e-3, "target_modules": ["q_proj"], "batch_size": 1},
    "four": {"rank": 4, "lr": 5e-3, "target_modules": "all-linear", "batch_size": 2, "max_grad_norm": 0.1},
    "eight": {"rank": 8, "lr": 2e-3, "target_modules": ["v_proj", "down_proj"], "dora": True, "accumulate": 2},
    "sixteen": {"rank": 16, "lr": 1e-4, "target_modules": ["lm_head", "embed_tokens", "o_proj"], "schedule": "linear"},
}


@pytest.fixture(scope="module")
def base(llama: Path) -> Base:
    return load_base(EngineConfig(model=llama, dtype="float32"))


def jobs(folder: Path, group: str, **common: Any) -> dict[str, TrainingJob]:
    """Jobs with data of their own."""
    made = {}
    for number, (name, settings) in enumerate(SETTINGS.items()):
        data = write_rows(folder / f"{name}.jsonl", completion_rows(TEXTS[number : number + 4]))
        made[name] = make_job({
            "data": data, "output": folder / group / name, "steps": STEPS, "batch_size": 3, **settings, **common
        })  # fmt: skip
    return made


def run_of(job: TrainingJob, base: Base) -> JobRun:
    return start_run(prepare_job(job, base, "base"), base, resume=False)


def losses_of(runs: list[JobRun], base: Base, **options: Any) -> dict[str, list[float]]:
    trainer = Trainer(base.decoder, **options)
    for run in runs:
        trainer.add(run)
    losses: dict[str, list[float]] = {run.job.label: [] for run in runs}
    trainer.train(report=lambda run: losses[run.job.label].append(run.last_metrics["loss"]), is_stopped=lambda: False)
    return losses


def test_four_jobs_together_have_the_losses_of_each_alone(tmp_path: Path, base: Base) -> None:
    together = losses_of([run_of(job, base) for job in jobs(tmp_path, "together").values()], base)
    for name, job in jobs(tmp_path, "alone").items():
        alone = losses_of([run_of(job, base)], base)[name]
        assert len(alone) == STEPS
        assert together[name] == pytest.approx(alone, abs=2e-6)
    assert any(abs(losses[0] - losses[-1]) > 0.1 for losses in together.values())


def test_four_jobs_together_in_float64_are_each_alone_to_the_eighth_digit(
    llama: Path, tmp_path: Path, base: Base
) -> None:
    double = replace(
        base, decoder=build_decoder(open_checkpoint(llama), dtype=torch.float64, device=torch.device("cpu"))
    )
    together = losses_of([run_of(job, double) for job in jobs(tmp_path, "together").values()], double)
    for name, job in jobs(tmp_path, "alone").items():
        assert together[name] == pytest.approx(losses_of([run_of(job, double)], double)[name], abs=1e-8)


def test_a_job_that_joins_late_and_pauses_has_the_losses_it_has_alone(tmp_path: Path, base: Base) -> None:
    names = jobs(tmp_path, "together", steps=10)
    early, late = run_of(names["four"], base), run_of(names["two"], base)
    trainer = Trainer(base.decoder)
    trainer.add(early)
    found: dict[str, list[float]] = {"two": [], "four": []}
    for number in range(20):
        if number == 3:
            trainer.add(late)
        if number == 6:
            late.pause()
        if number == 9:
            late.go_on()
        for run in trainer.step():
            found[run.job.label].append(run.last_metrics["loss"])
    assert late.state == early.state == "finished"
    for name, job in jobs(tmp_path, "alone", steps=10).items():
        if name in found:
            assert found[name] == pytest.approx(losses_of([run_of(job, base)], base)[name], abs=2e-6)


def test_whether_jobs_share_a_pass_changes_nothing(tmp_path: Path, base: Base) -> None:
    mixed = losses_of([run_of(job, base) for job in jobs(tmp_path, "mixed", steps=5).values()], base)
    apart = losses_of([run_of(job, base) for job in jobs(tmp_path, "apart", steps=5).values()], base, mix_rows=1)
    for name in SETTINGS:
        assert mixed[name] == pytest.approx(apart[name], abs=2e-6)


def test_a_poisoned_job_leaves_the_others_bit_identical(tmp_path: Path, base: Base) -> None:
    healthy = [run_of(job, base) for job in jobs(tmp_path, "healthy", steps=8).values()]
    ill = [run_of(job, base) for job in jobs(tmp_path, "ill", steps=8).values()]
    for parameter in ill[1].trainable.parameters.values():
        parameter.data.fill_(torch.nan)
    expected, found = losses_of(healthy, base), losses_of(ill, base)
    assert ill[1].state == "failed"
    assert "not finite" in str(ill[1].failure)
    assert not (ill[1].folder / "adapter_model.safetensors").exists()
    for well, same in zip(healthy, ill, strict=True):
        if same is not ill[1]:
            assert found[same.job.label] == expected[well.job.label]
            for name, parameter in well.trainable.parameters.items():
                assert torch.equal(parameter, same.trainable.parameters[name])


def test_metrics_that_cannot_be_written_end_their_job_and_no_other(tmp_path: Path, base: Base) -> None:
    made = jobs(tmp_path, "full", steps=3)
    ill, well = run_of(made["two"], base), run_of(made["four"], base)
    (ill.folder / "metrics.jsonl").mkdir()
    losses_of([ill, well], base)
    assert (ill.state, well.state) == ("failed", "finished")
    assert "the metrics cannot be written" in str(ill.failure)


def test_a_failure_is_told_after_the_others_have_finished(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    common: dict[str, Any] = {"data": data, "steps": 5, "schedule": "constant"}
    pair = [
        make_job({**common, "output": tmp_path / "ill", "lr": 1e37}),
        make_job({**common, "output": tmp_path / "well"}),
    ]
    with pytest.raises(TrainingFailed, match="ill: loss or gradient"):
        train_together(EngineConfig(model=llama), pair)
    assert (tmp_path / "well" / "adapter_config.json").exists()
