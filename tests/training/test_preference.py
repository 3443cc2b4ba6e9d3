"""Direct preference optimisation, against the published formula over PEFT with and without its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graftlm import LLM
from graftlm.errors import ConfigurationError, TrainingDataError
from graftlm.layers.patch import ModelPatch
from graftlm.text import Tokenizer, load_tokenizer
from graftlm.training import train
from graftlm.training.document import RowRefused, encode_pair
from graftlm.training.job import TrainingJob, make_job
from graftlm.training.loss import backward, document_losses
from graftlm.training.objective import Preference
from graftlm.training.packed_batch import Share, pack
from tests.tiny import make_adapter, make_llama
from tests.training import peft_loop
from tests.training.peft_loop import TEXTS, write_rows
from tests.training.test_gradients import decoder_of, double_norms, trainable_of

BETA = 0.3
ROWS = [
    {"prompt": text[: len(text) // 2], "chosen": text[len(text) // 2 :], "rejected": other}
    for text, other in zip(TEXTS, ("no", *TEXTS[:-1]), strict=True)
]


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Tokenizer:
    return load_tokenizer(llama)


def pairs_of(base: Path) -> list[list[peft_loop.Ids]]:
    """Chosen and rejected of each row, by transformers' tokenizer."""
    return [
        [
            peft_loop.encode_completion(base, {"prompt": row["prompt"], "completion": row[answer]})
            for answer in ("chosen", "rejected")
        ]
        for row in ROWS
    ]


def peft_loss(model: Any, pairs: list[list[peft_loop.Ids]]) -> Tensor:
    """The mean over pairs of -log sigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))."""
    losses = []
    for pair in pairs:
        policy = [-peft_loop.summed_loss(model, ids, counts) for ids, counts in pair]
        with torch.no_grad(), model.disable_adapter():
            reference = [-peft_loop.summed_loss(model, ids, counts) for ids, counts in pair]
        margin = BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
        losses.append(-functional.logsigmoid(margin))
    return torch.stack(losses).mean()


def test_losses_are_those_of_the_formula_over_peft(llama: Path, tmp_path: Path) -> None:
    start = make_adapter(llama, tmp_path / "start", scale=0.05, target_modules="all-linear")
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    common: dict[str, Any] = {"lr": 2e-3, "schedule": "constant", "shuffle": False, "batch_size": 4, "steps": 10}
    train(
        llama,
        data=data,
        output=tmp_path / "out",
        init_adapter=start,
        objective="dpo",
        beta=BETA,
        dtype="float32",
        **common,
    )
    found = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]

    pairs = pairs_of(llama)
    model = peft_loop.load(llama, start)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    expected = []
    for step in range(10):
        optimizer.zero_grad()
        loss = peft_loss(model, pairs[:4] if step % 2 == 0 else pairs[4:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert [line["loss"] for line in found] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[1] - 0.05
    assert found[-1]["margin"] > found[1]["margin"]
    assert 0 <= found[-1]["accuracy"] <= 1


def test_gradients_are_those_of_the_formula_over_peft(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.float64)
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, target_modules=["q_proj", "down_proj", "lm_head"])
    decoder = decoder_of(base)
    tokenizer = load_tokenizer(base)
    documents = tuple(document for row in ROWS for document in encode_pair(row, tokenizer))
    trainable = trainable_of(adapter, decoder)
    (reference,) = document_losses(decoder, pack([Share(patch=ModelPatch(), documents=documents)], decoder))
    backward(
        decoder,
        pack([Share(patch=trainable.patch(), documents=documents)], decoder),
        [Preference(BETA).slopes(len(ROWS), reference)],
        recompute_layers=False,
    )

    model = peft_loop.load(base, adapter, torch.float64)
    double_norms(model)
    peft_loss(model, pairs_of(base)).backward()
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert expected.keys() == trainable.parameters.keys()
    for name, gradient in expected.items():
        found = trainable.parameters[name].grad
        assert gradient is not None
        assert found is not None
        assert gradient.abs().max() > 1e-5, name
        assert (found - gradient).abs().max() <= 1e-8 * (1 + gradient.abs().max().item()), name


def test_passes_and_jobs_that_share_them_do_not_matter(llama: Path, tmp_path: Path) -> None:
    """R113: in four passes of one pair as in one of four, with another job beside it or alone."""
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:4])
    common: dict[str, Any] = {"data": data, "objective": "dpo", "steps": 3, "lr": 1e-2, "shuffle": False}
    for name, settings in (("one", {"batch_size": 4}), ("four", {"batch_size": 1, "accumulate": 4})):
        train(llama, output=tmp_path / name, eval_data=data, eval_every=1, **common, **settings)
    one, four = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "four")
    )
    assert one[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    # What is measured after an update is what the next one begins with.
    assert one[1]["loss"] == pytest.approx(one[0]["eval_loss"], abs=1e-6)
    for line, other in zip(one, four, strict=True):
        assert line == pytest.approx(other, abs=1e-6)


def test_what_is_preferred_becomes_likelier_than_what_is_not(llama: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    train(llama, data=data, output=tmp_path / "out", objective="dpo", steps=30, lr=2e-2, rank=4)
    llm = LLM(llama, adapters={"sums": tmp_path / "out"}, kv_cache_bytes=1 << 20)
    prompt, (four, five) = tokenizer.encode("2+2="), tokenizer.encode("45")
    learnt = llm.logits(prompt, adapter="sums")[-1] - llm.logits(prompt)[-1]
    llm.shutdown()
    assert learnt[four] - learnt[five] > 1


ASKED = [{"role": "user", "content": "hi"}]
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("hello", "go away"))


def test_conversations_and_openais_form_are_the_same_pair(tokenizer: Tokenizer) -> None:
    forms = [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"input": {"messages": ASKED}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    ]
    pairs = [encode_pair(form, tokenizer) for form in forms]
    assert pairs[0] == pairs[1] == pairs[2]
    for document, text in zip(pairs[0], ("hello</s>", "go away</s>"), strict=True):
        assert "".join(tokenizer.token_text(document.token_ids[place]) for place in document.targets) == text


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "completion": "b"}, "needs chosen and rejected; its keys are prompt, completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"prompt": "a", "chosen": "b", "rejected": 5}, "rejected is not a text"),
        ({"chosen": "b", "rejected": "c"}, "prompt is missing"),
        ({"chosen": [*ASKED, GOOD], "rejected": ASKED}, "no turn of the assistant's"),
        ({"prompt": ASKED, "chosen": [{"content": "x"}], "rejected": [BAD]}, r"chosen\[0\] needs a role"),
        ({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD, *ASKED]}, "only the beginning"),
    ],
)
def test_rows_that_prefer_nothing_are_refused(tokenizer: Tokenizer, row: dict[str, Any], match: str) -> None:
    with pytest.raises(RowRefused, match=match):
        encode_pair(row, tokenizer)


def test_wrong_rows_are_reported_before_training(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [ROWS[0], {"text": "x"}])
    with pytest.raises(TrainingDataError, match=r"rows\.jsonl:2: needs chosen"):
        train(llama, data=data, output=tmp_path / "out", objective="dpo", steps=1)
    with pytest.raises(ConfigurationError, match="cannot be split"):
        TrainingJob(data="d", output="o", objective="dpo", long_documents="split")
    with pytest.raises(ConfigurationError, match=r"objective has an unknown value.*sft, dpo"):
        make_job({"data": "d", "output": "o", "objective": "ppo"})
