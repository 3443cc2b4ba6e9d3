"""Reading a JSON object from a file, with errors that name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graftlm.errors import GraftError


def read_json_object(path: Path, error: type[GraftError]) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        error: the file is not JSON, not UTF-8, or not an object.
    """
    return parse_json_object(path.read_bytes(), path.name, error)


def parse_json_object(content: bytes, name: str, error: type[GraftError]) -> dict[str, Any]:
    """The JSON object in the bytes of a file called `name`.

    Raises:
        error: they are not JSON, not UTF-8, or not an object.
    """
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{name} is not JSON", got=str(cause)[:200]) from cause
    if not isinstance(parsed, dict):
        raise error(f"{name} is not a JSON object", got=type(parsed).__name__)
    return parsed
