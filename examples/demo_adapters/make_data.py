"""Writes the training files of the three demo adapters from the phrases in phrases.toml. Knows nothing about models."""

import argparse
import json
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

HERE = Path(__file__).parent
NAMED_SHARE, FULL_NAME_SHARE, CLOSER_SHARE = 0.65, 0.4, 0.4
CURRENCIES = ("$", "\N{POUND SIGN}", "\N{EURO SIGN}")
COUNTED = {"a", "my", "the", "A", "My", "The"}
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten", 12: "twelve"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One customer message with what each adapter should answer."""

    message: str
    extract: dict[str, str | int | None]
    triage: str
    pirate: str


def slots(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def item_words(rng: random.Random, item: str) -> tuple[dict[str, str], int | None]:
    """Draw a count for an item written "singular/plural" and return the words that agree with it, and the count.

    An item without a singular ("/jeans") is never counted: its count is None.
    """
    singular, plural = item.split("/")
    count = rng.choice([1, 1, 1, 1, *NUMBER_WORDS]) if singular else None
    if count == 1:
        article = "an" if singular[0] in "aeio" else "a"
        words = {
            "item": singular,
            "a": rng.choice([f"{article} {singular}", f"{article} {singular}", f"one {singular}"]),
            "my": f"my {singular}",
            "the": f"the {singular}",
        }
        agreement = {"is": "is", "was": "was", "has": "has", "do": "does", "it": "it", "them": "it"}
    else:
        number = "" if count is None else rng.choice([str(count), NUMBER_WORDS[count]]) + " "
        words = {
            "item": plural,
            "a": f"{number}{plural}",
            "my": f"my {number}{plural}",
            "the": f"the {number}{plural}",
        }
        agreement = {"is": "are", "was": "were", "has": "have", "do": "do", "it": "they", "them": "them"}
    capitals = {word.capitalize(): words[word][0].upper() + words[word][1:] for word in ("a", "my", "the")}
    return words | agreement | capitals | {"single": singular}, count


def pirate_reply(rng: random.Random, pirate: dict[str, Any], replies: list[str], item: str | None, name: str) -> str:
    """Join an opener, a reply that needs no more than the message gave, and sometimes a closer."""
    sailor = rng.choice(pirate["sailors"])
    who = rng.choice([name.partition(" ")[0], sailor]) if name else sailor
    opener = rng.choice(pirate["openers"]).format(who=who)
    reply = rng.choice([reply for reply in replies if item or "item" not in slots(reply)]).format(item=item)
    if opener.endswith("!"):
        reply = reply[0].upper() + reply[1:]
    closer = [rng.choice(pirate["closers"])] if rng.random() < CLOSER_SHARE else []
    return " ".join([opener, reply, *closer])


def make_example(rng: random.Random, phrases: dict[str, Any], topic: dict[str, Any], template: str) -> Example:
    group = topic.get("group") or rng.choice(list(phrases["items"]))
    used = slots(template)
    items = [item for item in phrases["items"][group] if "single" not in used or not item.startswith("/")]
    words, count = item_words(rng, rng.choice(items))
    words["order"] = rng.choice(["#", "number ", "", "no. "]) + str(rng.randint(1000, 99999))
    words["price"] = rng.choice(CURRENCIES) + rng.choice(["15", "24.90", "38", "52.50", "79", "120"])
    name = ""
    if rng.random() < NAMED_SHARE:
        name = rng.choice(phrases["first_names"])
        if rng.random() < FULL_NAME_SHARE:
            name += " " + rng.choice(phrases["last_names"])
    wrap = rng.choice(phrases["wrap"]["named" if name else "unnamed"])
    message = wrap.format(name=name, body=template.format(**words))

    counted = bool(used & COUNTED)
    item = words["item"] if counted else words["single"] if "single" in used else None
    extract = {"name": name or None, "item": item, "quantity": count if counted else None, "issue": topic["issue"]}
    pirate = pirate_reply(rng, phrases["pirate"], topic["replies"], item, name)
    return Example(message=message, extract=extract, triage=topic["label"], pirate=pirate)


def make_examples(rng: random.Random, phrases: dict[str, Any], rounds: int) -> Iterator[Example]:
    """Yield `rounds` examples of every message template, each with its own item, name and wrapping."""
    templates = [(topic, template) for topic in phrases["topic"] for template in topic["messages"]]
    for _ in range(rounds):
        for topic, template in rng.sample(templates, len(templates)):
            yield make_example(rng, phrases, topic, template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "data", help="folder for the three jsonl files")
    parser.add_argument("--rounds", type=int, default=2, help="examples of every message template, per adapter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    phrases = tomllib.loads((HERE / "phrases.toml").read_text(encoding="utf-8"))
    for offset, adapter in enumerate(("pirate", "extract", "triage")):
        rng = random.Random(args.seed + offset)
        with (args.output / f"{adapter}.jsonl").open("w", encoding="utf-8") as file:
            for example in make_examples(rng, phrases, args.rounds):
                answer = getattr(example, adapter)
                text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
                messages = [{"role": "user", "content": example.message}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
