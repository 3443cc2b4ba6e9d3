"""Answers the held-out messages with the base model and each demo adapter, and prints how many meet each criterion."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from criteria import EXTRACT_KEYS, Fields, is_label, is_pirate, parse_extract, right_fields
from train import HERE, RECIPES, SHIPPED

from graftlm import LLM, SamplingParams
from graftlm.demo import demo_model, demo_quantization

MAX_TOKENS = 80
BASE = "base"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One message and what the extract and triage adapters should answer."""

    message: str
    extract: Fields
    triage: str


def read_heldout(file: Path) -> list[HeldOut]:
    return [HeldOut(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def answer_all(adapters: dict[str, Path], messages: Sequence[str]) -> dict[str, dict[str, str]]:
    """Answers by model and message, greedy, all in one batch."""
    llm = LLM(demo_model(), **demo_quantization(None), adapters=adapters, max_model_len=512)
    rows = [(name, message) for name in (None, *adapters) for message in messages]
    outputs = llm.chat(
        [[{"role": "user", "content": message}] for _, message in rows],
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0),
        adapter=[name for name, _ in rows],
    )
    llm.shutdown()
    answers: dict[str, dict[str, str]] = {}
    for (name, message), output in zip(rows, outputs, strict=True):
        answers.setdefault(name or BASE, {})[message] = output.outputs[0].text
    return answers


def shares(heldout: list[HeldOut], answers: dict[str, str]) -> dict[str, float]:
    """Return, for each criterion, the share of the held-out messages whose answer meets it."""
    right = [right_fields(answers[case.message], case.extract) for case in heldout]
    met = {
        "pirate": [is_pirate(answers[case.message]) for case in heldout],
        "json": [parse_extract(answers[case.message]) is not None for case in heldout],
        "name+item": [{"name", "item"} <= keys for keys in right],
        **{key: [key in keys for keys in right] for key in EXTRACT_KEYS},
        "triage": [is_label(answers[case.message], case.triage) for case in heldout],
    }
    return {criterion: sum(hits) / len(heldout) for criterion, hits in met.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=Path, default=SHIPPED, help="folder that holds one folder per adapter")
    parser.add_argument("--answers", action="store_true", help="print every answer too")
    parser.add_argument("--message", help="answer this message instead of the held-out ones")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    adapters = {name: args.adapters / name for name in RECIPES if (args.adapters / name).is_dir()}
    if not adapters:
        message = f"no adapter folder ({', '.join(RECIPES)}) in {args.adapters}; run train.py first"
        raise SystemExit(message)
    heldout = read_heldout(HERE / "data" / "heldout.jsonl")
    messages = [args.message] if args.message else [case.message for case in heldout]
    answers = answer_all(adapters, messages)
    if args.message or args.answers:
        for message in messages:
            print(message, *(f"  {name}: {texts[message]}" for name, texts in answers.items()), sep="\n")
    if not args.message:
        table = {name: shares(heldout, texts) for name, texts in answers.items()}
        print(f"{'':8}" + "".join(f"{criterion:>11}" for criterion in table[BASE]))
        for name, row in table.items():
            print(f"{name:8}" + "".join(f"{share:>11.0%}" for share in row.values()))


if __name__ == "__main__":
    main()
