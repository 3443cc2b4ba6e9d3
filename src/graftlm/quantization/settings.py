"""Reading quantization_config's values, with errors that name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from graftlm.errors import CheckpointError


class Settings:
    """The values of one JSON object in a quantization_config.

    where: the object's place in config.json, for messages.
    """

    def __init__(self, values: object, where: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} is not an object", got=repr(values)[:100])
        self._values: Mapping[str, Any] = values
        self._where = where

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that is there and not null."""
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def integer(self, *keys: str, allowed: Collection[int]) -> int | None:
        """A number out of `allowed`; None where there is none.

        Raises:
            CheckpointError
        """
        value = self.get(*keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            raise self.refused(keys[0], value, _listing(allowed))
        return value

    def group_size(self, *keys: str) -> int | None:
        """A number of columns, or -1 for all; None where there is none.

        Raises:
            CheckpointError
        """
        value = self.get(*keys)
        if value is None or value == -1 or _is_size(value):
            return None if value is None else int(value)
        raise self.refused(keys[0], value, "-1, or a positive number")

    def text(self, *keys: str, allowed: Collection[str], why: str | None = None) -> str | None:
        """A word out of `allowed`, in lower case; None where there is none.

        Raises:
            CheckpointError: with `why` as the advice.
        """
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.refused(keys[0], value, ", ".join(sorted(allowed)), do=why)
        return value.lower()

    def flag(self, key: str) -> bool | None:
        """
        Raises:
            CheckpointError: it is neither true nor false.
        """
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.refused(key, value, "true, false")

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive numbers, as a list or as "2x3"; None where there are none.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return None
        sizes = value.split("x") if isinstance(value, str) else value
        if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(_is_size(size) for size in sizes):
            raise self.refused(key, value, "two positive numbers")
        return int(sizes[0]), int(sizes[1])

    def child(self, key: str) -> Settings | None:
        """The object under a key; None where there is none.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        return None if value is None else Settings(value, f"{self._where}.{key}")

    def children(self, key: str) -> Mapping[str, Settings]:
        """The objects in the object under a key, in its order; none where there is none.

        Raises:
            CheckpointError: it holds something else.
        """
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.refused(key, value, "an object")
        return {name: Settings(entry, f"{self._where}.{key}.{name}") for name, entry in value.items()}

    def refused(self, key: str, value: object, allowed: str, do: str | None = None) -> CheckpointError:
        """The error for a value that cannot be accepted."""
        return CheckpointError(
            f"{self._where}.{key} is not supported", got=repr(value)[:100], allowed=allowed[:300], do=do
        )


def _listing(allowed: Collection[int]) -> str:
    if isinstance(allowed, range):
        return f"{allowed.start} to {allowed.stop - 1}"
    return ", ".join(map(str, sorted(allowed)))


def _is_size(size: object) -> bool:
    if isinstance(size, str):
        return re.fullmatch(r"[1-9][0-9]{0,8}", size) is not None
    return type(size) is int and size > 0
