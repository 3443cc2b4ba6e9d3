"""Options of a job: what they mean, and what is refused before anything is trained."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from graftlm.config import EngineConfig
from graftlm.errors import AdapterUnsupported, ConfigurationError, GraftError
from graftlm.training import TrainingJob, train, train_together
from graftlm.training.job import make_job
from graftlm.training.job_file import read_job_file
from graftlm.training.schedule import learning_rate
from tests.tiny import ALL_PROJECTIONS, make_adapter
from tests.training.peft_loop import completion_rows, write_rows


def job(**settings: Any) -> TrainingJob:
    return make_job({"data": "d", "output": "o", **settings})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": 0}, "lr is not usable"),
        ({"lr": math.nan}, "lr is not usable"),
        ({"lr": -1e-3}, "lr is not usable"),
        ({"rank": 0}, "rank is not usable"),
        ({"steps": True}, "steps is not usable"),
        ({"schedule": "cubic"}, "schedule has an unknown value.*cosine, linear, constant"),
        ({"long_documents": "drop"}, "long_documents has an unknown value"),
        ({"learning_rate": 1}, "no such options; got: learning_rate"),
        ({"data": ""}, "needs data"),
        ({"eval_fraction": 1.0}, "nothing to learn from"),
        ({"eval_fraction": 0.1, "eval_data": "e"}, "two ways"),
        ({"max_grad_norm": math.inf}, "max_grad_norm is not usable"),
    ],
)
def test_values_out_of_range_are_refused_by_name(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        job(**settings)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("lm_head", ["lm_head"]),
        ("all-linear", "all-linear"),
        (r".*layers\.[01]\..*proj", r".*layers\.[01]\..*proj"),
    ],
)
def test_targets_are_names_or_one_expression(written: object, meant: object) -> None:
    assert job(target_modules=written).targets == meant


def test_a_job_file_has_the_options_names_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "sql.toml"
    path.write_text('data = "rows.jsonl"\noutput = "out"\nlr = 1e-3\ntarget_modules = ["q_proj"]\nshuffle = false\n')
    read = read_job_file(path, {"lr": 5.0, "seed": 3})
    assert read == job(data="rows.jsonl", output="out", lr=1e-3, target_modules=["q_proj"], shuffle=False, seed=3)
    path.write_text("lr = 0\n")
    with pytest.raises(ConfigurationError, match=r"sql\.toml: "):
        read_job_file(path, {})
    path.write_text("lr = = 1")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_job_file(path, {})


def test_schedules_warm_up_and_end_where_they_should() -> None:
    cosine = job(lr=1.0, warmup_steps=2)
    assert [learning_rate(cosine, step, 6) for step in (0, 1, 2, 4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    linear = job(lr=1.0, schedule="linear", warmup_steps=0)
    assert [learning_rate(linear, step, 4) for step in range(4)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert {learning_rate(job(lr=1.0, schedule="constant"), step, 100) for step in range(100)} == {1.0}
    assert learning_rate(job(lr=1.0), 0, 100) == pytest.approx(1 / 3)


def refused(llama: Path, tmp_path: Path, **settings: Any) -> GraftError:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    with pytest.raises(GraftError) as caught:
        train(llama, **{"data": data, "output": tmp_path / "out", "steps": 1, **settings})
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    return caught.value


def test_an_unknown_target_lists_names_that_are_close(llama: Path, tmp_path: Path) -> None:
    """R120."""
    message = str(refused(llama, tmp_path, target_modules="q_prj,v_proj"))
    assert "got: q_prj" in message
    assert "did you mean q_proj" in message
    assert "down_proj" in message
    assert "target_modules names no module" in str(refused(llama, tmp_path, target_modules=r".*attention\.q"))


def test_a_module_that_is_no_target_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    """R120."""
    assert isinstance(refused(llama, tmp_path, target_modules="input_layernorm"), AdapterUnsupported)


def test_a_length_beyond_the_context_is_refused(llama: Path, tmp_path: Path) -> None:
    assert "beyond the model's context; got: 513" in str(refused(llama, tmp_path, max_length=513))


def test_rows_that_are_cut_are_counted(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 40}, {"text": "y" * 30}, {"text": "z"}])
    train(llama, data=data, output=tmp_path / "out", steps=1, max_length=20)
    assert "out: rows of more than 20 tokens, which were cut: 2" in caplog.messages


def test_an_output_folder_with_something_in_it_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert "the output folder exists" in str(refused(llama, tmp_path))


def test_two_jobs_cannot_have_one_name_or_folder(llama: Path, tmp_path: Path) -> None:
    for first, second, match in (
        ({"output": "a"}, {"output": "./a", "name": "b"}, "one output"),
        ({"output": "x/a"}, {"output": "y/a"}, "one name"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            train_together(EngineConfig(model=llama), [job(**first), job(**second)])


def test_options_that_differ_from_the_init_adapters_are_listed(llama: Path, tmp_path: Path) -> None:
    start = make_adapter(llama, tmp_path / "start", r=4)
    message = str(refused(llama, tmp_path, init_adapter=start, rank=8, dora=True, target_modules="q_proj"))
    for difference in (
        "rank: 8 asked, 4 in init_adapter",
        "dora: True asked, False",
        "target_modules: 2 modules asked, 4 in init_adapter",
    ):
        assert difference in message


def test_an_init_adapter_that_is_more_than_a_lora_is_refused(llama: Path, tmp_path: Path) -> None:
    start = make_adapter(llama, tmp_path / "start", alora_invocation_tokens=[5, 6])
    assert "alora_invocation_tokens" in str(refused(llama, tmp_path, init_adapter=start))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"modules_to_save": "lm_haed"}, "modules_to_save names no module of this model; got: lm_haed"),
        ({"trainable_token_indices": "5,259"}, "no rows for; got: .*259.*; allowed: token ids below 259"),
        ({"trainable_token_indices": "one"}, "trainable_token_indices is not usable"),
        ({"target_parameters": "experts.gate_up_proj"}, "target_parameters names experts.gate_up_proj"),
        ({"target_modules": "embed_tokens", "modules_to_save": "norm", "droppout": 0.1}, "no such options.*droppout"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    llama: Path, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    assert re.search(match, str(refused(llama, tmp_path, **settings)))


def test_rows_of_a_head_that_is_adapted_too_are_refused(tied_llama: Path, tmp_path: Path) -> None:
    settings = {"target_modules": "lm_head", "trainable_token_indices": "5"}
    assert "together with a low-rank update of the output head" in str(refused(tied_llama, tmp_path, **settings))


def test_an_init_adapter_with_a_table_of_its_own_is_refused(llama: Path, tmp_path: Path) -> None:
    """R120."""
    start = make_adapter(llama, tmp_path / "start", target_modules=["q_proj", "embed_tokens"])
    weights = start / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = torch.ones(259, 64)
    safetensors.torch.save_file(tensors, weights)
    assert "a matrix of its own for model.embed_tokens" in str(refused(llama, tmp_path, init_adapter=start))


def test_the_defaults_are_written_as_peft_writes_them(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    train(llama, data=data, output=tmp_path / "out", steps=1)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (16, 32, 0.0)
    assert config["target_modules"] == sorted(ALL_PROJECTIONS)
    assert not config["use_dora"]


def test_training_ends_early_when_the_held_out_loss_stops_falling(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    trained = train(
        llama, data=data, output=tmp_path / "out", steps=60, lr=0.3, eval_fraction=0.25, eval_every=1, patience=2
    )
    assert trained.finished
    assert trained.step < 60
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["eval_loss"] for line in lines]
    assert len(measured) == trained.step
    assert min(measured[-2:]) >= min(measured[:-2])
