"""Regular expressions over module names in a quantization_config."""

from __future__ import annotations

import re

import regex  # re's syntax, but it can be stopped

from graftlm.errors import CheckpointError

# Module names are short: an honest pattern needs microseconds.
MATCH_SECONDS = 0.25


class NamePattern:
    """A pattern that is tried at the start of a module's name, as `re.match` does.

    field: where it stands, for messages.

    Raises:
        CheckpointError: it is no regular expression.
    """

    def __init__(self, pattern: str, field: str) -> None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as cause:
            raise CheckpointError(f"{field} holds a broken regular expression", got=repr(pattern)[:200]) from cause
        self._pattern = pattern
        self._field = field

    def matches(self, path: str) -> bool:
        """
        Raises:
            CheckpointError: it takes longer than any honest pattern.
        """
        try:
            return regex.match(self._pattern, path, timeout=MATCH_SECONDS) is not None
        except (TimeoutError, regex.error, RecursionError) as cause:
            raise CheckpointError(
                f"{self._field}: a regular expression takes too long", got=repr(self._pattern)[:200]
            ) from cause
