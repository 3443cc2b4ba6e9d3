"""LoRA's dropout: PEFT's arithmetic, and draws that depend on nothing but the job."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.config import EngineConfig
from graftlm.engine.base import Base, load_base
from graftlm.errors import GraftError
from graftlm.training import train
from graftlm.training.dropout import Dropout
from graftlm.training.job import make_job
from graftlm.training.job_run import JobRun
from graftlm.training.pace import Pace
from graftlm.training.trainer import Trainer
from graftlm.training.training import prepare_job, start_run
from tests.tiny import ALL_PROJECTIONS, make_adapter
from tests.training.peft_loop import completion_rows, encode_completion, load, summed_loss, write_rows

RATE, SEED, STEPS, LR = 0.3, 5, 4, 1e-2
BATCHES = [[0, 1], [2, 3], [4, 5], [6, 7]]


@dataclass
class Pass:
    """What of the reference's loop the masks depend on."""

    step: int = 0
    document: int = 0
    num_rows: int = 0
    targets: tuple[int, ...] = ()


class Masked(torch.nn.Module):
    """In the place of one of PEFT's dropout modules: zeroes what Graft does, and scales as `torch.nn.Dropout`."""

    def __init__(self, path: str, now: Pass) -> None:
        super().__init__()
        self._path, self._now = path, now

    def forward(self, x: Tensor) -> Tensor:
        now = self._now
        dropout = Dropout(
            rate=RATE, seed=SEED, step=now.step, lengths=(now.num_rows,), num_targets=(len(now.targets),),
            first_document=now.document,
        )  # fmt: skip
        is_head = self._path == "lm_head"
        rows = torch.tensor(now.targets if is_head else range(now.num_rows))
        mask = dropout.head_mask(self._path) if is_head else dropout.mask(self._path)
        return x.index_copy(1, rows, mask(x[0, rows])[None] / (1 - RATE))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


ENDS = {"target_modules": ["down_proj", "lm_head"]}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ALL_PROJECTIONS},
    "dora": {"target_modules": ALL_PROJECTIONS, "use_dora": True},
    "lora-head": ENDS,
    "dora-head": {**ENDS, "use_dora": True},
    "lora_bias-head": {**ENDS, "lora_bias": True},
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. .* LoRA tensor.* invalid shape")
@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_peft_with_the_same_elements_dropped(llama: Path, tmp_path: Path, method: str) -> None:
    rows = completion_rows()
    start = make_adapter(llama, tmp_path / "start", **METHODS[method])
    now = Pass()
    model = load(llama, start).train()
    for name, module in list(model.named_modules()):
        if name.endswith("lora_dropout"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_dropout")
            module["default"] = Masked(path, now)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    expected = []
    for now.step, batch in enumerate(BATCHES):
        total, count = torch.zeros(()), 0
        for now.document, index in enumerate(batch):
            ids, learnt = encode_completion(llama, rows[index])
            now.num_rows = len(ids) - 1
            now.targets = tuple(place - 1 for place, is_learnt in enumerate(learnt) if is_learnt)
            total = total + summed_loss(model, ids, learnt)
            count += sum(learnt)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        expected.append(total.item() / count)
    common: dict[str, Any] = {
        "data": write_rows(tmp_path / "rows.jsonl", rows), "init_adapter": start, "steps": STEPS, "lr": LR,
        "seed": SEED, "schedule": "constant", "shuffle": False, "dtype": "float32",
    }  # fmt: skip
    train(llama, output=tmp_path / "whole", dropout=RATE, batch_size=2, **common)
    assert losses(tmp_path / "whole") == pytest.approx(expected, abs=1e-5)
    train(llama, output=tmp_path / "parts", dropout=RATE, batch_size=1, accumulate=2, **common)
    assert losses(tmp_path / "parts") == pytest.approx(expected, abs=1e-5)
    train(llama, output=tmp_path / "without", batch_size=2, **common)
    assert abs(losses(tmp_path / "without")[0] - expected[0]) > 1e-3


@pytest.fixture(scope="module")
def base(llama: Path) -> Base:
    return load_base(EngineConfig(model=llama, dtype="float32"))


def run_of(base: Base, folder: Path, **settings: Any) -> JobRun:
    data = write_rows(folder.parent / f"{folder.name}.jsonl", completion_rows())
    given = {"data": data, "output": folder, "steps": STEPS, "lr": LR, "rank": 4, "dropout": RATE, **settings}
    return start_run(prepare_job(make_job(given), base, "base"), base, resume=False)


def losses_of(trainer: Trainer, *runs: JobRun) -> list[float]:
    """Of the first."""
    for run in runs:
        trainer.add(run)
    trainer.train(report=lambda run: None, is_stopped=lambda: False)
    return losses(runs[0].folder)


def test_what_is_dropped_depends_on_no_other_job_nor_on_how_passes_are_made(base: Base, tmp_path: Path) -> None:
    alone = losses_of(Trainer(base.decoder), run_of(base, tmp_path / "alone"))
    other = run_of(base, tmp_path / "other", seed=9, steps=3, batch_size=2)
    beside = losses_of(Trainer(base.decoder), run_of(base, tmp_path / "beside"), other)
    divided = losses_of(Trainer(base.decoder, pace=Pace(1e-9)), run_of(base, tmp_path / "divided"))
    again = losses_of(Trainer(base.decoder, recompute_layers=True), run_of(base, tmp_path / "again"))
    for found in (beside, divided, again):
        assert found == pytest.approx(alone, abs=2e-6)
    other_seed = losses_of(Trainer(base.decoder), run_of(base, tmp_path / "seed", seed=1, shuffle=False))
    assert losses_of(Trainer(base.decoder), run_of(base, tmp_path / "same", seed=0, shuffle=False)) != other_seed


def test_every_module_step_document_and_seed_has_a_mask_of_its_own() -> None:
    x = torch.ones(40, 50)
    first = Dropout(rate=0.25, seed=1, step=2, lengths=(10, 30), num_targets=(15, 25), first_document=3)
    masks = [
        first.mask("a")(x),
        first.mask("b")(x),
        replace(first, seed=2).mask("a")(x),
        replace(first, step=3).mask("a")(x),
        replace(first, first_document=4).mask("a")(x),
    ]
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert mask.mean().item() == pytest.approx(0.75, abs=0.05)
    assert not [pair for pair in pairwise(masks) if torch.equal(*pair)]
    second = replace(first, lengths=(30,), num_targets=(25,), first_document=4)
    assert torch.equal(second.mask("a")(x[10:]), masks[0][10:])
    assert torch.equal(second.head_mask("a")(x[15:]), first.head_mask("a")(x)[15:])


def test_the_head_may_be_computed_a_part_of_the_rows_at_a_time() -> None:
    x = torch.ones(40, 50)
    mask = Dropout(rate=0.25, seed=1, step=2, lengths=(), num_targets=(10, 30), first_document=0).head_mask("a")
    parts = [mask(x[:7]), mask.from_row(7)(x[7:25]), mask.from_row(7).from_row(18)(x[25:])]
    assert torch.equal(torch.cat(parts), mask(x))


def test_an_init_adapter_goes_on_with_its_dropout_unless_another_is_asked(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    start = make_adapter(llama, tmp_path / "start", lora_dropout=0.2)
    for name, settings, expected in (("own", {}, 0.2), ("none", {"dropout": 0}, 0), ("other", {"dropout": 0.1}, 0.1)):
        train(llama, data=data, output=tmp_path / name, init_adapter=start, steps=1, **settings)
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["lora_dropout"] == expected
    assert losses(tmp_path / "own")[0] != losses(tmp_path / "none")[0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dropout": 1.0}, "dropout is not usable; got: 1.0; allowed: a number from 0, below 1"),
        ({"dropout": -0.1}, "dropout is not usable"),
        ({"dropout": float("nan")}, "dropout is not usable"),
    ],
)
def test_a_dropout_that_cannot_be_is_refused(llama: Path, tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    with pytest.raises(GraftError, match=match):
        train(llama, data=data, output=tmp_path / "out", steps=1, **settings)
    assert not (tmp_path / "out").exists()
