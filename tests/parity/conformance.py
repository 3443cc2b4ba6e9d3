"""What of PEFT is served, counted: the cases the parity tests run against PEFT, and what becomes of each config field.

    python -m tests.parity.conformance

prints the table; the documentation has the same one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import peft

from graftlm.adapters.config import REFUSED_INITIALISATIONS
from graftlm.adapters.methods import METHODS, REFUSED_METHODS
from graftlm.adapters.target_config import INERT_FIELDS, READ_FIELDS
from tests.parity.lora_cases import CASES as LORA_CASES
from tests.parity.test_family_adapters import CASES as FAMILY_CASES
from tests.parity.test_fold_methods import CASES as FOLD_CASES
from tests.parity.test_vector_methods import CASES as VECTOR_CASES

# Written by PEFT for itself; not in any file.
RUNTIME_FIELDS = frozenset({"runtime_config"})


@dataclass(frozen=True, kw_only=True)
class MethodConformance:
    """One peft_type that is served.

    num_cases: adapters of it that tests compare with PEFT. read, inert, refused, ignored: the fields of PEFT's config,
    by what becomes of a value in them.
    """

    peft_type: str
    num_cases: int
    read: frozenset[str]
    inert: frozenset[str]
    refused: frozenset[str]
    ignored: frozenset[str]


def conformance() -> list[MethodConformance]:
    cases = Counter({"LORA": len(LORA_CASES)})
    peft_types = {config: peft_type.value for peft_type, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    others = (*FAMILY_CASES.values(), *FOLD_CASES.values(), *VECTOR_CASES.values())
    cases.update(peft_types[config_class] for _, config_class, _ in others)
    return [_conformance(peft_type, cases[peft_type]) for peft_type in sorted(METHODS, key=lambda name: -cases[name])]


def _conformance(peft_type: str, num_cases: int) -> MethodConformance:
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(peft_type)]
    names = frozenset(field.name for field in dataclasses.fields(config_class)) - RUNTIME_FIELDS
    known = METHODS[peft_type].fields
    refused = known.refused.keys()
    read, inert = (READ_FIELDS | known.read) - refused, INERT_FIELDS | known.inert
    return MethodConformance(
        peft_type=peft_type,
        num_cases=num_cases,
        read=names & read,
        inert=names & inert - read,
        refused=names & refused,
        ignored=names - read - inert - refused,
    )


def summary() -> str:
    methods = conformance()
    served = sum(method.num_cases for method in methods)
    fields = sum(len(method.refused) for method in methods)
    ignored = sum(len(method.ignored) for method in methods)
    return (
        f"{served} adapters of {len(methods)} methods served with PEFT's logits and tokens; "
        f"{len(REFUSED_METHODS)} methods, {fields} fields and {len(REFUSED_INITIALISATIONS)} initialisations refused "
        f"by name; {ignored} fields ignored."
    )


def table() -> str:
    """In Markdown."""
    rows = [
        "| `peft_type` | adapters compared with PEFT | fields read | without effect when applied | refused | ignored |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows += [
        f"| `{method.peft_type}` | {method.num_cases} | {len(method.read)} | {len(method.inert)} | "
        f"{len(method.refused)} | {len(method.ignored)} |"
        for method in conformance()
    ]
    return "\n".join(rows)


def refused_fields() -> str:
    """In Markdown: what a config may ask for in vain, and why."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for peft_type, method in sorted(METHODS.items()):
        for name, reason in method.fields.refused.items():
            by_reason.setdefault((f"`{name}`", reason), []).append(f"`{peft_type}`")
    for name, reason in REFUSED_INITIALISATIONS.items():
        by_reason[f'`init_lora_weights="{name}"`', reason] = ["`LORA`"]
    rows = ["| field | of | because |", "| --- | --- | --- |"]
    rows += [f"| {name} | {', '.join(types)} | {reason} |" for (name, reason), types in sorted(by_reason.items())]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(), "", summary(), "", refused_fields(), sep="\n")
