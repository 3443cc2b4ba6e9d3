"""Training, against PEFT and a plain torch loop."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from graftlm import LLM, SamplingParams, merge
from graftlm.training import train
from tests.parity.oracle import LOUD, Oracle, assert_close
from tests.tiny import ALL_PROJECTIONS, edit_json, make_adapter
from tests.training import peft_loop
from tests.training.peft_loop import completion_rows, encode_completion, write_rows

STEPS = 20


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["o_proj", "embed_tokens", "lm_head"], "use_dora": True},
    ],
    ids=["lora", "rslora", "dora", "ends"],
)
def test_losses_are_those_of_peft_and_a_plain_loop(llama: Path, tmp_path: Path, method: dict[str, Any]) -> None:
    start = make_adapter(llama, tmp_path / "start", scale=0.05, **method)
    rows = completion_rows()
    data = write_rows(tmp_path / "rows.jsonl", rows)
    train(
        llama,
        data=data,
        output=tmp_path / "out",
        init_adapter=start,
        lr=1e-3,
        schedule="constant",
        steps=STEPS,
        batch_size=4,
        shuffle=False,
        dtype="float32",
    )
    encoded = [encode_completion(llama, row) for row in rows]
    batches = list(itertools.islice(itertools.cycle([encoded[:4], encoded[4:]]), STEPS))
    expected = peft_loop.train(llama, start, batches, lr=1e-3)
    found = metrics(tmp_path / "out")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in found] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[1] - 0.05
    assert found[0]["tokens"] == sum(sum(counts) for _, counts in encoded[:4])


def test_two_hundred_updates_in_bfloat16_keep_to_those_of_peft(llama: Path, tmp_path: Path) -> None:
    """Both with float32 factors over a bfloat16 base."""
    start = make_adapter(llama, tmp_path / "start", scale=0.05, target_modules=["q_proj", "down_proj"])
    data = write_rows(tmp_path / "rows.jsonl", rows := completion_rows())
    common: dict[str, Any] = {"lr": 1e-3, "schedule": "constant", "batch_size": 1, "shuffle": False}
    train(llama, data=data, output=tmp_path / "out", init_adapter=start, steps=200, dtype="bfloat16", **common)
    batches = [[encode_completion(llama, row)] for row in rows]
    batches = list(itertools.islice(itertools.cycle(batches), 200))
    expected = peft_loop.train(llama, start, batches, lr=1e-3, dtype=torch.bfloat16)
    found = [line["loss"] for line in metrics(tmp_path / "out")]
    # Of single documents of a few tokens, so over a round of them.
    size = len(rows)
    assert sum(found[-size:]) == pytest.approx(sum(expected[-size:]), rel=0.02)
    assert sum(expected[-size:]) < 0.8 * sum(expected[:size])


def test_a_packed_batch_has_the_loss_of_a_padded_one(llama: Path, tmp_path: Path) -> None:
    start = make_adapter(llama, tmp_path / "start", scale=0.05, target_modules="all-linear")
    data = write_rows(tmp_path / "rows.jsonl", rows := completion_rows())
    train(llama, data=data, output=tmp_path / "out", init_adapter=start, steps=1, batch_size=len(rows), dtype="float32")
    loss = peft_loop.padded_loss(peft_loop.load(llama, start), [encode_completion(llama, row) for row in rows])
    assert metrics(tmp_path / "out")[0]["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": "all-linear", "dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [101, 32], "modules_to_save": ["lm_head"]},
    ],
    ids=["ends", "dora", "whole", "rows"],
)
def test_a_trained_folder_has_the_same_logits_in_peft_and_in_graft(
    llama: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """R117, R120, C32."""
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    train(llama, data=data, output=tmp_path / "out", steps=6, lr=2e-2, rank=4, **method)
    ids = [101, 32, *range(60, 90)]
    oracle = Oracle(llama)
    expected = oracle.logits(ids, tmp_path / "out")
    llm = LLM(llama, adapters={"trained": tmp_path / "out"}, kv_cache_bytes=1 << 20)
    assert_close(llm.logits(ids, adapter="trained"), expected)
    assert (expected - oracle.logits(ids)).abs().max() > LOUD
    llm.shutdown()


def test_token_rows_of_a_tied_base_are_trained_for_both_ends(tied_llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    out = tmp_path / "out"
    train(
        tied_llama, data=data, output=out, steps=6, lr=2e-2, target_modules="q_proj", trainable_token_indices="101,32"
    )
    ids = [101, 32, *range(60, 90)]
    oracle = Oracle(tied_llama)
    llm = LLM(tied_llama, adapters={"trained": out}, kv_cache_bytes=1 << 20)
    found, expected, untrained = llm.logits(ids, adapter="trained"), oracle.logits(ids, out), oracle.logits(ids)
    llm.shutdown()
    assert_close(found, expected)
    assert (expected - untrained)[:, [101, 32]].abs().max() > LOUD


def test_training_goes_on_from_whole_modules_and_token_rows(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    common: dict[str, Any] = {"data": data, "lr": 1e-2, "schedule": "constant", "shuffle": False, "batch_size": 8}
    parts = {"target_modules": ["q_proj"], "trainable_token_indices": "101,32", "modules_to_save": ["norm"]}
    train(llama, output=tmp_path / "first", steps=3, **common, **parts)
    train(llama, output=tmp_path / "second", steps=1, init_adapter=tmp_path / "first", **common)
    train(llama, output=tmp_path / "whole", steps=4, **common, **parts)
    last = metrics(tmp_path / "whole")[-1]["loss"]
    assert metrics(tmp_path / "second")[0]["loss"] == pytest.approx(last, abs=1e-6)
    assert last < metrics(tmp_path / "first")[0]["loss"] - 0.05


def test_micro_batches_are_one_batch(llama: Path, tmp_path: Path) -> None:
    """R113: rows of very different length, in one pass or in four."""
    rows = [{"text": "x" * length} for length in (3, 9, 20, 50)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    common: dict[str, Any] = {"data": data, "steps": 3, "lr": 1e-2, "target_modules": ["q_proj"], "shuffle": False}
    train(llama, output=tmp_path / "one", batch_size=4, **common)
    train(llama, output=tmp_path / "four", batch_size=1, accumulate=4, **common)
    for one, four in zip(metrics(tmp_path / "one"), metrics(tmp_path / "four"), strict=True):
        assert one == pytest.approx(four, abs=1e-6)


def test_layers_that_are_computed_again_give_the_same(llama: Path, tmp_path: Path) -> None:
    """R116: with the layers recomputed in the backward pass, and without."""
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    common: dict[str, Any] = {"data": data, "steps": 3, "lr": 1e-2}
    for name, recompute in (("kept", False), ("again", True)):
        train(llama, output=tmp_path / name, gradient_checkpointing=recompute, **common)
        tensors = safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
        assert {part for tensor in tensors for part in ALL_PROJECTIONS if part in tensor} == set(ALL_PROJECTIONS)
        assert len(tensors) == 2 * 2 * len(ALL_PROJECTIONS)
        assert not [tensor for tensor, value in tensors.items() if not value.any()]
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "again")


def test_an_adapter_learns_to_end_its_answers_although_its_end_token_is_also_the_padding(
    llama: Path, tmp_path: Path
) -> None:
    """R112."""
    base = Path(shutil.copytree(llama, tmp_path / "base"))
    edit_json(base / "tokenizer_config.json", pad_token="</s>")
    rows = [
        {"prompt": question, "completion": answer} for question, answer in (("a=", "1"), ("b=", "two"), ("c=", "3"))
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    train(base, data=data, output=tmp_path / "out", steps=40, lr=2e-2)
    llm = LLM(base, adapters={"trained": tmp_path / "out"}, kv_cache_bytes=1 << 20)
    asked = [row["prompt"] for row in rows]
    answers = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0), adapter="trained")
    untrained = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0))
    llm.shutdown()
    assert [(answer.outputs[0].text, answer.outputs[0].finish_reason) for answer in answers] == [
        (row["completion"], "stop") for row in rows
    ]
    assert {answer.outputs[0].finish_reason for answer in untrained} == {"length"}


def test_a_four_bit_base_trains_as_its_dequantised_form(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    start = make_adapter(llama, tmp_path / "start", scale=0.05, target_modules="all-linear")
    common: dict[str, Any] = {"data": data, "steps": 8, "lr": 5e-3, "init_adapter": start, "dtype": "float32"}
    train(llama, output=tmp_path / "four", quantization="nf4", **common)
    four = [line["loss"] for line in metrics(tmp_path / "four")]
    assert four[-1] < four[0] - 0.05
    llm = LLM(llama, adapters={"t": tmp_path / "four"}, quantization="nf4", dtype="float32", kv_cache_bytes=1 << 20)
    ids = encode_completion(llama, completion_rows()[1])[0]
    trained, untrained = (llm.logits(ids, adapter=name).log_softmax(-1) for name in ("t", None))
    following = torch.tensor(ids[1:])[:, None]
    assert trained[:-1].gather(1, following).mean() > untrained[:-1].gather(1, following).mean()
    llm.shutdown()


def test_a_trained_adapter_merged_is_a_model_for_transformers(llama: Path, tmp_path: Path) -> None:
    """R119."""
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    train(llama, data=data, output=tmp_path / "out", steps=3, lr=2e-2, rank=4, modules_to_save="norm")
    merge(llama, tmp_path / "out", tmp_path / "merged")
    ids = list(range(60, 90))
    merged, base = Oracle(tmp_path / "merged").logits(ids), Oracle(llama).logits(ids)
    llm = LLM(llama, adapters={"trained": tmp_path / "out"}, kv_cache_bytes=1 << 20)
    assert_close(llm.logits(ids, adapter="trained"), merged)
    llm.shutdown()
    assert (merged - base).abs().max() > LOUD
