"""Stopping and going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm.config import EngineConfig
from graftlm.errors import ConfigurationError, TrainingFailed
from graftlm.training import TrainedAdapter, train, train_together
from graftlm.training.job import make_job
from tests.training.peft_loop import completion_rows, write_rows

STEPS = 7


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    held_out = write_rows(tmp_path / "held_out.jsonl", completion_rows()[:2])
    return {
        "data": data, "steps": STEPS, "batch_size": 3, "lr": 1e-2, "eval_data": held_out, "eval_every": 2, **more
    }  # fmt: skip


def stop_after(num_updates: int) -> Any:
    """A question that is answered yes after so many updates."""
    answers = iter([False] * num_updates)
    return lambda: next(answers, True)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(llama: Path, tmp_path: Path, dropout: float) -> None:
    """R118."""
    common = settings(tmp_path, dropout=dropout)
    train(llama, output=tmp_path / "straight", **common)
    job = make_job({**common, "output": tmp_path / "stopped"})
    (stopped,) = train_together(EngineConfig(model=llama), [job], is_stopped=stop_after(4))
    assert (stopped.finished, stopped.step) == (False, 4)
    assert not (tmp_path / "stopped" / "adapter_model.safetensors").exists()
    resumed = train(llama, output=tmp_path / "stopped", resume=True, **common)
    assert (resumed.finished, resumed.step) == (True, STEPS)
    for name in ("adapter_model.safetensors", "adapter_config.json", "metrics.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "metrics.jsonl"
    }  # fmt: skip


def test_updates_after_the_last_checkpoint_are_made_again(llama: Path, tmp_path: Path) -> None:
    """A run that dies leaves metrics beyond its checkpoint, the last of them perhaps half written."""
    common = settings(tmp_path, save_every=2)
    train(llama, output=tmp_path / "straight", **common)
    job = make_job({**common, "output": tmp_path / "died"})
    train_together(EngineConfig(model=llama), [job], is_stopped=stop_after(2))
    with (tmp_path / "died" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    train(llama, output=tmp_path / "died", resume=True, **common)
    for name in ("adapter_model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "died" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_checkpoint_of_other_settings_is_refused_with_the_differences(llama: Path, tmp_path: Path) -> None:
    common = settings(tmp_path)
    job = make_job({**common, "output": tmp_path / "out"})
    train_together(EngineConfig(model=llama), [job], is_stopped=stop_after(1))
    with pytest.raises(ConfigurationError) as caught:
        train(llama, output=tmp_path / "out", resume=True, **{**common, "lr": 2e-2, "alpha": 8})
    assert caught.value.got == (
        "adapter_config.lora_alpha: '32' then, '8' now; alpha: None then, 8 now; lr: 0.01 then, 0.02 now"
    )
    write_rows(tmp_path / "rows.jsonl", completion_rows()[::-1])
    with pytest.raises(ConfigurationError, match="data: "):
        train(llama, output=tmp_path / "out", resume=True, **common)


def test_of_several_jobs_those_that_had_finished_stay_as_they_are(llama: Path, tmp_path: Path) -> None:
    common = settings(tmp_path)
    short, long = (
        make_job({**common, "output": tmp_path / name, "steps": n}) for name, n in (("short", 2), ("long", 5))
    )
    train_together(EngineConfig(model=llama), [short, long], is_stopped=stop_after(3))
    before = (tmp_path / "short" / "adapter_model.safetensors").read_bytes()
    told: list[TrainedAdapter] = []
    resumed = train_together(EngineConfig(model=llama), [short, long], resume=True, conclude=told.append)
    assert [(adapter.name, adapter.step, adapter.finished) for adapter in resumed] == [
        ("short", 2, True), ("long", 5, True)
    ]  # fmt: skip
    assert told == resumed
    assert resumed[0].metrics["step"] == 2
    assert (tmp_path / "short" / "adapter_model.safetensors").read_bytes() == before
    with pytest.raises(ConfigurationError, match="no checkpoint to resume from"):
        train_together(EngineConfig(model=llama), [short, long], resume=True)


def test_without_a_checkpoint_there_is_nothing_to_resume(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint"):
        train(llama, output=tmp_path / "out", resume=True, **settings(tmp_path))


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(llama: Path, tmp_path: Path) -> None:
    common = settings(tmp_path)
    job = make_job({**common, "output": tmp_path / "out"})
    train_together(EngineConfig(model=llama), [job], is_stopped=stop_after(1))
    path = tmp_path / "out" / "checkpoint.pt"
    before = path.read_bytes()
    (tmp_path / "out" / ".checkpoint.pt.partial").mkdir()
    (tmp_path / "out" / ".checkpoint.pt.partial" / "in the way").touch()
    with pytest.raises(TrainingFailed, match="cannot be written"):
        train_together(EngineConfig(model=llama), [job], resume=True, is_stopped=stop_after(1))
    assert path.read_bytes() == before
