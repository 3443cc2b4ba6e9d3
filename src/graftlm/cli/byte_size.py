"""Sizes in bytes as people write them: 2GiB, 512MiB, 1500000."""

from __future__ import annotations

import re
from fractions import Fraction

from graftlm.errors import ConfigurationError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_byte_size(text: str) -> int:
    """Number of bytes. GiB counts in 1024s, GB in 1000s.

    Raises:
        ConfigurationError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigurationError(
            "this is not a size in bytes", got=repr(text), allowed="a number, alone or with KiB, MiB, GiB, KB, MB, GB"
        )
    return round(Fraction(match[1]) * unit)


def format_byte_size(num_bytes: int) -> str:
    """The shortest spelling that `parse_byte_size` reads back as the same number."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)
