"""Regular expressions from an adapter's config: refused when broken, given up on when they take too long."""

from __future__ import annotations

import re

import regex  # re's syntax, but it can be stopped, and it lets other threads run

from graftlm.errors import AdapterCorrupt

# What PEFT puts around a pattern, written for a match of the whole name; {} is the pattern.
# Source: peft/utils/other.py, match_target_against_key and get_pattern_key; peft/tuners/tuners_utils.py,
# check_target_module_exists (0.21).
FULL_NAME = "{}"
NAME_ENDING = r"(.*\.)?({})"
LAYER_INDEX = r"(?:^|.*?\.){}\.(?P<index>\d+)\..*"
ANY_LAYER_INDEX = r".*?\.[^.]*\.(?P<index>\d+)\..*"
# Module names are short: an honest pattern needs microseconds.
MATCH_SECONDS = 0.25


def check_pattern(field: str, template: str, pattern: str) -> None:
    """Raise unless `pattern`, put into `template`, is a regular expression to Python's own `re`, which PEFT uses.

    Raises:
        AdapterCorrupt
    """
    try:
        re.compile(template.replace("{}", pattern, 1))
    except (re.error, OverflowError, RecursionError) as cause:
        raise AdapterCorrupt(
            f"adapter_config.json: {field} holds a broken regular expression", got=repr(pattern)[:200]
        ) from cause


def pattern_match(template: str, pattern: str, path: str) -> re.Match[str] | None:
    """`re.fullmatch` of a checked pattern in its template.

    Raises:
        AdapterCorrupt: it takes longer than any honest pattern.
    """
    try:
        match: re.Match[str] | None = regex.fullmatch(template.replace("{}", pattern, 1), path, timeout=MATCH_SECONDS)
    except (TimeoutError, regex.error, RecursionError) as cause:
        raise AdapterCorrupt(
            "adapter_config.json: a regular expression takes too long", got=repr(pattern)[:200]
        ) from cause
    return match
