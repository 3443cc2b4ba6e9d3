"""Fills `{{ name }}` in pages with what the code itself says, so that no default or option is written twice."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from typer.core import TyperGroup

from graftlm.adapters.methods import METHODS, REFUSED_METHODS
from graftlm.cli import app
from graftlm.cli.options import field_help
from graftlm.config import EngineConfig
from graftlm.engine.sampling_params import SamplingParams
from graftlm.models.families import FAMILIES
from graftlm.server.errors import STATUS_AND_CODE
from graftlm.server.fields import harmless_values
from graftlm.server.metrics import metric_table
from graftlm.server.schemas import REQUEST_BODIES
from graftlm.training import TrainingJob

# mkdocs runs as a program of its own, which does not look for modules where it is started.
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.parity import conformance

# Written by benchmarks/family_parity.py.
FAMILY_PARITY = Path(__file__).parent / "reference" / "family_parity.json"
ADAPTER_KINDS = ("base", "lora", "dora", "saved_head")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page.

    Raises:
        KeyError: a page asks for something that is not generated.
    """
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: GENERATED[match.group(1)](), markdown)


def engine_options() -> str:
    return _fields(EngineConfig)


def sampling_params() -> str:
    return _fields(SamplingParams)


def training_options() -> str:
    return _fields(TrainingJob)


def served_methods() -> str:
    return "Served `peft_type`s: " + ", ".join(f"`{name}`" for name in sorted(METHODS)) + "."


def refused_methods() -> str:
    rows = ["| refused `peft_type` | because |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED_METHODS.items()))])


def request_fields() -> str:
    """A table of what each generation route does with each field; what is not listed is refused by name."""
    names = sorted({name for body in REQUEST_BODIES.values() for name in body.model_fields})
    rows = ["| field | " + " | ".join(f"`{route}`" for route in REQUEST_BODIES) + " |"]
    rows.append("| --- |" + " --- |" * len(REQUEST_BODIES))
    for name in names:
        cells = [_use_of_field(body, name) for body in REQUEST_BODIES.values()]
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _use_of_field(body: type[BaseModel], name: str) -> str:
    if name not in body.model_fields:
        return "refused"
    harmless = harmless_values(body, name)
    if harmless is None:
        return "honoured"
    values = [value for value in harmless if value is not None]
    return "refused" + (", but for " + ", ".join(f"`{json.dumps(value)}`" for value in values) if values else "")


def errors() -> str:
    rows = ["| exception | HTTP status | code | meaning |", "| --- | --- | --- | --- |"]
    for error, (status, code) in STATUS_AND_CODE.items():
        meaning = (error.__doc__ or "").strip().splitlines()[0]
        rows.append(f"| `{error.__name__}` | {status} | {f'`{code}`' if code else ''} | {meaning} |")
    return "\n".join(rows)


def metrics() -> str:
    rows = ["| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [*rows, *(f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in metric_table())]
    )


def commands() -> str:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return "\n\n".join(_command(name, command) for name, command in _leaves(group))


def _leaves(group: TyperGroup) -> Iterator[tuple[str, Any]]:
    """Every command with its full name: `keys create`."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from ((f"{name} {inner}", found) for inner, found in _leaves(command))
        else:
            yield name, command


def _command(name: str, command: Any) -> str:
    if isinstance(command, TyperGroup):
        return "\n\n".join(_command(f"{name} {own}", each) for own, each in command.commands.items())
    rows = ["| option | meaning | default |", "| --- | --- | --- |"]
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        flags = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
        empty = parameter.default in (None, (), "", False) or callable(parameter.default)
        default = "" if empty else f"`{parameter.default}`"
        rows.append(f"| {', '.join(f'`{flag}`' for flag in flags)} | {parameter.help or ''} | {default} |")
    return f"## graft {name}\n\n{(command.help or '').strip()}\n\n" + "\n".join(rows)


def families() -> str:
    by_type: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, case in json.loads(FAMILY_PARITY.read_text())["cases"].items():
        by_type[case["model_type"]].append((name, case))
    rows = [
        "| `model_type` | variants (width, heads) | base | LoRA everywhere | DoRA | head saved |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model_type in sorted(FAMILIES):
        cases = by_type[model_type]
        variants = ", ".join(f"{name} ({case['hidden_size']}, {case['num_attention_heads']})" for name, case in cases)
        worst = [max((case["differences"][kind] for _, case in cases), default=None) for kind in ADAPTER_KINDS]
        cells = " | ".join("not measured" if value is None else f"{value:.1e}" for value in worst)
        rows.append(f"| `{model_type}` | {variants} | {cells} |")
    return "\n".join(rows)


def family_parity_run() -> str:
    run = json.loads(FAMILY_PARITY.read_text())
    libraries = ", ".join(f"{library} {version}" for library, version in run["versions"].items())
    lengths = ", ".join(str(length) for length in run["prompt_lengths"])
    return f"prompts of {lengths} tokens, float32, {libraries}, on {run['machine']}"


def _fields(config: type[Any]) -> str:
    texts = field_help(config)
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(config):
        has_default = field.default is not dataclasses.MISSING
        default = f"`{field.default!r}`" if has_default else ""
        rows.append(f"| `{field.name}` | {default} | {texts.get(field.name, '')} |")
    return "\n".join(rows)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "conformance": conformance.table,
    "conformance_summary": conformance.summary,
    "engine_options": engine_options,
    "errors": errors,
    "families": families,
    "family_parity_run": family_parity_run,
    "metrics": metrics,
    "refused_fields": conformance.refused_fields,
    "refused_methods": refused_methods,
    "request_fields": request_fields,
    "sampling_params": sampling_params,
    "served_methods": served_methods,
    "training_options": training_options,
}
