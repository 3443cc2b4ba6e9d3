"""Single values of adapter_config.json: of the right type and range, or an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graftlm.adapters.patterns import FULL_NAME, LAYER_INDEX, NAME_ENDING, check_pattern, pattern_match
from graftlm.errors import AdapterCorrupt

# JSON integers have no limit, floats do.
MAX_INTEGER = 1 << 63


def shown(value: object) -> str:
    """A value as it may stand in a message: a config can be megabytes."""
    return repr(value)[:200]


def first_match(patterns: Mapping[str, float], path: str, default: float) -> float:
    for pattern, value in patterns.items():
        if pattern_match(NAME_ENDING, pattern, path):
            return value
    return default


def read_rank(field: str, value: object, default: int | None = None) -> int:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterCorrupt(
            f"adapter_config.json: {field} is not a rank", got=shown(value), allowed="an integer from 1"
        )
    return value


def read_count(field: str, value: object, default: int) -> int:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_INTEGER:
        raise AdapterCorrupt(
            f"adapter_config.json: {field} is not a count", got=shown(value), allowed="an integer from 0"
        )
    return value


def read_integer(field: str, value: object, default: int | None = None) -> int:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not an integer", got=shown(value))
    return value


def read_seed(field: str, value: object, default: int) -> int:
    """What a torch generator takes for a seed."""
    seed = read_integer(field, value, default)
    if not -(1 << 63) <= seed < 1 << 64:
        raise AdapterCorrupt(f"adapter_config.json: {field} is not a seed", got=shown(seed))
    return seed


def read_number(field: str, value: object, default: float | None = None) -> float:
    value = default if value is None else value
    number = value if isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_INTEGER) else math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not a finite number", got=shown(value))
    return float(number)


def read_flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not true or false", got=shown(value))
    return bool(value)


def read_patterns(raw: Mapping[str, Any], field: str) -> dict[str, Any]:
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not an object", got=type(patterns).__name__)
    for pattern in patterns:
        check_pattern(field, NAME_ENDING, pattern)
    return patterns


def read_ranks(raw: Mapping[str, Any], field: str) -> dict[str, int]:
    """Patterns of module names and their ranks."""
    return {pattern: read_rank(field, value) for pattern, value in read_patterns(raw, field).items()}


def read_numbers(raw: Mapping[str, Any], field: str) -> dict[str, float]:
    """Patterns of module names and their numbers."""
    return {pattern: read_number(field, value) for pattern, value in read_patterns(raw, field).items()}


def read_module_names(raw: Mapping[str, Any], field: str) -> tuple[str, ...] | str | None:
    names = raw.get(field)
    if names is None:
        return None
    if isinstance(names, str):
        if names.lower() != "all-linear":
            check_pattern(field, FULL_NAME, names)
        return names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not a string or a list of strings", got=shown(names))
    return tuple(names)


def read_names(raw: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = read_module_names(raw, field)
    return (names,) if isinstance(names, str) else names or ()


def read_token_ids(field: str, value: object) -> tuple[int, ...]:
    ids: Any = [] if value is None else value
    valid = isinstance(ids, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < MAX_INTEGER for item in ids
    )
    if not valid:
        raise AdapterCorrupt(f"adapter_config.json: {field} is not made of token ids", got=shown(value))
    return tuple(ids)


def read_layer_indices(value: object) -> tuple[int, ...]:
    indices = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in indices):
        raise AdapterCorrupt("adapter_config.json: layers_to_transform is not made of layer indices", got=shown(value))
    return tuple(indices)


def read_layer_ranges(field: str, value: object) -> tuple[tuple[int, int], ...]:
    """Pairs [start, stop) of layers."""
    ranges: Any = [] if value is None else value
    valid = isinstance(ranges, list) and all(isinstance(item, list) and len(item) == 2 for item in ranges)
    if not valid or not all(isinstance(end, int) and not isinstance(end, bool) for item in ranges for end in item):
        raise AdapterCorrupt(
            f"adapter_config.json: {field} is not made of ranges", got=shown(value), allowed="[[start, stop], ...]"
        )
    if not all(0 <= start < stop for start, stop in ranges):
        raise AdapterCorrupt(
            f"adapter_config.json: {field} has a range without layers", got=shown(value), allowed="0 <= start < stop"
        )
    return tuple((start, stop) for start, stop in ranges)


def read_layers_pattern(value: object) -> tuple[str, ...]:
    patterns: list[Any] = [] if not value else value if isinstance(value, list) else [value]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise AdapterCorrupt("adapter_config.json: layers_pattern is not made of strings", got=shown(value))
    for pattern in patterns:
        check_pattern("layers_pattern", LAYER_INDEX, pattern)
    return tuple(patterns)
