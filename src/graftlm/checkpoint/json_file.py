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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path.name} is not JSON", got=str(cause)[:200]) from cause
    if not isinstance(content, dict):
        raise error(f"{path.name} is not a JSON object", got=type(content).__name__)
    return content
