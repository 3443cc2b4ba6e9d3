"""What counts as a right answer of each demo adapter. Pure functions of text; knows nothing about models."""

import json
import re

PIRATE_WORDS = frozenset(
    {
        "arr",
        "arrr",
        "ahoy",
        "avast",
        "aye",
        "ye",
        "yer",
        "matey",
        "mateys",
        "hearty",
        "bucko",
        "doubloons",
        "booty",
        "scallywag",
        "scallywags",
        "landlubber",
        "shiver",
    }
)
ENOUGH_PIRATE_WORDS = 2
EXTRACT_KEYS = ("name", "item", "quantity", "issue")
ISSUES = frozenset({"late", "damaged", "wrong item", "refund", "question", "other"})
LABELS = frozenset({"billing", "shipping", "returns", "account", "product"})

Fields = dict[str, str | int | None]


def is_pirate(answer: str) -> bool:
    """Whether the answer holds at least two different pirate words."""
    return len(PIRATE_WORDS.intersection(re.findall(r"[a-z]+", answer.lower()))) >= ENOUGH_PIRATE_WORDS


def parse_extract(answer: str) -> Fields | None:
    """Return the fields if the answer is one line of JSON with exactly the four keys and a known issue, else None."""
    text = answer.strip()
    if "\n" in text:
        return None
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(fields, dict) or tuple(fields) != EXTRACT_KEYS or fields["issue"] not in ISSUES:
        return None
    return fields


def right_fields(answer: str, expected: Fields) -> frozenset[str]:
    """Return the keys whose value equals the expected one, text compared without regard to case; none if invalid."""
    fields = parse_extract(answer)
    if fields is None:
        return frozenset()
    return frozenset(key for key in EXTRACT_KEYS if _folded(fields[key]) == _folded(expected[key]))


def is_label(answer: str, expected: str) -> bool:
    """Whether the answer is the expected label and nothing else."""
    return answer.strip() == expected


def _folded(value: str | int | None) -> str | int | None:
    return value.casefold() if isinstance(value, str) else value
