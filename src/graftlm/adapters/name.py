"""What can be an adapter's name. It goes into URLs, messages, metrics and paths."""

from __future__ import annotations

import re
from pathlib import Path

from graftlm.errors import AdapterError, AdapterNameInvalid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: object) -> None:
    """Raises AdapterNameInvalid: this is none."""
    if not is_name(name):
        raise AdapterNameInvalid(
            "this cannot be an adapter's name",
            got=repr(name)[:100],
            allowed="1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit, without '..'",
        )


def naming(name: str, error: AdapterError, *, hide: Path | None = None) -> AdapterError:
    """The same error about an adapter with a name.

    Args:
        hide: a path that those who ask for the adapter need not know.
    """

    def shown(text: object) -> str | None:
        if text is None or hide is None:
            return None if text is None else str(text)
        return str(text).replace(str(hide), name)

    what = f"adapter {name}: {shown(error.what)}"
    return type(error)(what, got=shown(error.got), allowed=shown(error.allowed), do=shown(error.do))
