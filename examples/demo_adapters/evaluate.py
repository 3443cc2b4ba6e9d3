"""Answers the held-out messages with the base model and each demo adapter, and prints how many meet each criterion."""

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from criteria import EXTRACT_KEYS, Fields, is_label, is_pirate, parse_extract, right_fields
from peft import PeftModel
from train import HERE, RECIPES, load_base
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

ADAPTERS = HERE.parents[1] / "src" / "graftlm" / "demo" / "adapters"
MAX_NEW_TOKENS = 80
BASE = "base"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One message and what the extract and triage adapters should answer."""

    message: str
    extract: Fields
    triage: str


def read_heldout(file: Path) -> list[HeldOut]:
    return [HeldOut(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """Decode the answer to one message greedily, without the closing <|im_end|>."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def answer_all(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, name: str, messages: Sequence[str]
) -> dict[str, str]:
    """Answer every message with the adapter `name`, or with no adapter for "base"."""
    if name != BASE:
        model.set_adapter(name)
    with model.disable_adapter() if name == BASE else nullcontext():
        return {message: answer(model, tokenizer, message) for message in messages}


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
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder that holds one folder per adapter")
    parser.add_argument("--answers", action="store_true", help="print every answer too")
    parser.add_argument("--message", help="answer this message instead of the held-out ones")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    base, tokenizer = load_base()
    names = [name for name in RECIPES if (args.adapters / name).is_dir()]
    if not names:
        message = f"no adapter folder ({', '.join(RECIPES)}) in {args.adapters}; run train.py first"
        raise SystemExit(message)
    model = PeftModel.from_pretrained(base, args.adapters / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(args.adapters / name, adapter_name=name)
    model.eval()

    heldout = read_heldout(HERE / "data" / "heldout.jsonl")
    messages = [args.message] if args.message else [case.message for case in heldout]
    answers = {name: answer_all(model, tokenizer, name, messages) for name in [BASE, *names]}
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
