"""Whose files and jobs a caller may see."""

from __future__ import annotations

from collections.abc import Callable

# Given the name of an owner, None for what was made without API keys.
Owns = Callable[[str | None], bool]


def anybody(owner: str | None) -> bool:
    """For the server itself."""
    return True
