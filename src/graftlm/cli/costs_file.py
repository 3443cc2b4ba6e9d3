"""What steps took on some machine, as a file: `graft bench` writes it, `graft simulate` reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from graftlm.errors import ConfigurationError
from graftlm.routing.costs import StepCosts

_KIND = "graft step costs"


def write_costs(costs: StepCosts, path: Path, *, measured: str) -> None:
    """Args: measured: of what, and on what, in words.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    content = {"kind": _KIND, "measured": measured, "costs": dataclasses.asdict(costs)}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as cause:
        raise ConfigurationError("the costs cannot be written", got=f"{path}: {cause.strerror}") from cause


def read_costs(path: Path) -> tuple[StepCosts, str]:
    """The costs, and of what they were measured.

    Raises:
        ConfigurationError: the file cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ConfigurationError(
            "the costs cannot be read", got=f"{path}: {cause}", do="write them with graft bench MODEL --costs"
        ) from cause
    names = {field.name for field in dataclasses.fields(StepCosts)}
    costs = content.get("costs") if isinstance(content, dict) and content.get("kind") == _KIND else None
    if not isinstance(costs, dict) or costs.keys() != names:
        raise ConfigurationError(
            "this is no file of step costs",
            got=path,
            allowed=f'"kind": "{_KIND}" and "costs" with {", ".join(sorted(names))}',
            do="write one with graft bench MODEL --costs",
        )
    return StepCosts(**costs), str(content.get("measured", ""))
