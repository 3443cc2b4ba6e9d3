"""The demo's adapters do what they were trained for on messages kept out of training, and the base does not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graftlm import LLM, SamplingParams
from graftlm.demo import demo_adapters, demo_model, demo_quantization

EXAMPLES = Path(__file__).parents[2] / "examples" / "demo_adapters"
BASE = "base"


def load_criteria() -> ModuleType:
    spec = importlib.util.spec_from_file_location("criteria", EXAMPLES / "criteria.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


criteria = load_criteria()
heldout = [json.loads(line) for line in (EXAMPLES / "data" / "heldout.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """Answers by model, all computed in one batch of mixed rows."""
    llm = LLM(demo_model(), **demo_quantization(None), adapters=demo_adapters(), max_model_len=512)
    names: list[str | None] = [None, *demo_adapters()]
    rows = [(name, example["message"]) for example in heldout for name in names]
    outputs = llm.chat(
        [[{"role": "user", "content": message}] for _, message in rows],
        SamplingParams(max_tokens=48, temperature=0),
        adapter=[name for name, _ in rows],
    )
    llm.shutdown()
    by_model: dict[str, list[str]] = {}
    for (name, _), output in zip(rows, outputs, strict=True):
        by_model.setdefault(name or BASE, []).append(output.outputs[0].text)
    return by_model


def share(results: list[bool]) -> float:
    return sum(results) / len(results)


def trained_messages(name: str) -> set[str]:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()
    return {json.loads(line)["messages"][0]["content"] for line in lines}


@pytest.mark.parametrize("name", sorted(demo_adapters()))
def test_held_out_messages_are_in_no_training_file(name: str) -> None:
    messages = trained_messages(name)
    assert len(messages) >= 100
    assert not messages & {example["message"] for example in heldout}


def test_pirate_answers_like_a_pirate_and_the_base_does_not(answers: dict[str, list[str]]) -> None:
    assert share([criteria.is_pirate(answer) for answer in answers["pirate"]]) >= 0.9
    assert share([criteria.is_pirate(answer) for answer in answers[BASE]]) <= 0.1


def test_extract_answers_with_the_right_fields_and_the_base_does_not(answers: dict[str, list[str]]) -> None:
    assert share([criteria.parse_extract(answer) is not None for answer in answers["extract"]]) >= 0.9
    assert share([criteria.parse_extract(answer) is not None for answer in answers[BASE]]) == 0.0
    expected: list[dict[str, Any]] = [example["extract"] for example in heldout]
    found = [criteria.right_fields(*pair) for pair in zip(answers["extract"], expected, strict=True)]
    assert share([{"name", "item"} <= fields for fields in found]) >= 0.6


def test_triage_answers_with_the_right_label_and_the_base_does_not(answers: dict[str, list[str]]) -> None:
    labels = [example["triage"] for example in heldout]
    assert share([criteria.is_label(*pair) for pair in zip(answers["triage"], labels, strict=True)]) >= 0.75
    assert share([criteria.is_label(*pair) for pair in zip(answers[BASE], labels, strict=True)]) <= 0.2
