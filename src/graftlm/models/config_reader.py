"""Reading config.json with an account of what was read, so that a key nobody understood can be reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from graftlm.errors import CheckpointError

Choice = TypeVar("Choice")

# Keys that describe the file or training, not the arithmetic.
DESCRIPTIVE_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "rope_interleaved",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
# Nothing a config counts comes near it; a number beyond would be turned into memory before the weights are compared.
LARGEST_SIZE = 1 << 24


class ConfigReader:
    """A config whose keys are taken one by one.

    Args:
        section: where in config.json these keys stand, for messages; empty for the top level.
    """

    def __init__(self, config: Mapping[str, Any], section: str = "") -> None:
        self._config = config
        self._prefix = f"{section}." if section else ""
        self._read: set[str] = set(DESCRIPTIVE_KEYS)
        self._sections: dict[str, ConfigReader] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is absent or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, small enough to be a size.

        Raises:
            CheckpointError: absent without a default, or not such an integer.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {self._prefix}{key} is not a positive integer", got=repr(value)[:100])
        if value > LARGEST_SIZE:
            raise CheckpointError(f"config.json: {self._prefix}{key} is too large", got=repr(value)[:100])
        return value

    def quotient(self, key: str, divisor: str) -> int:
        """One positive integer divided by another, such as the width of a head.

        Raises:
            CheckpointError: one of them is no positive integer, or the division leaves a remainder.
        """
        whole, part = self.integer(key), self.integer(divisor)
        if whole % part:
            raise CheckpointError(
                f"config.json: {self._prefix}{key} is not a multiple of {self._prefix}{divisor}", got=f"{whole}, {part}"
            )
        return whole // part

    def integer_or_null(self, key: str, default: int | None) -> int | None:
        """A positive integer; None for null, `default` when the key is absent.

        Raises:
            CheckpointError: something else.
        """
        value = self._config.get(key, default)
        return self.get(key) if value is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            CheckpointError: absent without a default, or not a positive number.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"config.json: {self._prefix}{key} is not a positive number", got=repr(value))
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """A number that is not negative; 0 when the key is absent or null.

        Raises:
            CheckpointError: something else.
        """
        return self.number(key) if self.get(key, 0) != 0 else 0.0

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers.

        Raises:
            CheckpointError: absent, or something else.
        """
        values = self.get(key)
        if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
            raise CheckpointError(
                f"config.json: {self._prefix}{key} is not a list of positive numbers", got=repr(values)[:100]
            )
        return tuple(float(value) for value in values)

    def number_or_null(self, key: str, default: float | None) -> float | None:
        """A positive number; None where the config says null.

        Raises:
            CheckpointError: neither.
        """
        if self._config.get(key, default) is None:
            self._read.add(key)
            return None
        return self.number(key, default)

    def section(self, key: str) -> ConfigReader:
        """A nested object; empty when the key is absent or null. What is left unread in it counts as unread here.

        Raises:
            CheckpointError: it is no object.
        """
        if key in self._sections:
            return self._sections[key]
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {self._prefix}{key} is not an object", got=repr(value)[:100])
        self._sections[key] = ConfigReader(value, f"{self._prefix}{key}")
        return self._sections[key]

    def choice(self, key: str, allowed: Mapping[str, Choice], default: str | None = None) -> Choice:
        """What `allowed` has for the value of `key`.

        Raises:
            CheckpointError: absent without a default, or none of them.
        """
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise CheckpointError(
                f"config.json: {self._prefix}{key} is not supported", got=repr(value)[:100], allowed=", ".join(allowed)
            )
        return allowed[value]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self._prefix}{key} is not true or false", got=repr(value))
        return value

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse any value of `key` outside `allowed`; None in `allowed` also admits absence."""
        value = self.get(key)
        if value not in allowed:
            known = ", ".join(str(option) for option in allowed)
            raise CheckpointError(f"config.json: {self._prefix}{key} is not supported", got=repr(value), allowed=known)

    def spelling(self, *keys: str) -> str:
        """Which of the names of one setting the config uses; the first if it uses none.

        Raises:
            CheckpointError: it uses two, with different values.
        """
        used = {key: value for key in keys if (value := self.get(key)) is not None}
        if len(set(map(repr, used.values()))) > 1:
            got = ", ".join(f"{key}={value!r}" for key, value in used.items())
            raise CheckpointError("config.json: two names of one setting disagree", got=got[:100])
        return next(iter(used), keys[0])

    def ignore(self, *keys: str) -> None:
        """Count keys as read that change nothing in this family, whatever their values."""
        self._read.update(keys)

    def refuse_unread(self) -> None:
        """Every key with a value must have been read.

        Raises:
            CheckpointError: names those that were not.
        """
        if unread := self.unread():
            raise CheckpointError(
                "config.json has settings Graft does not know, which may change what the model computes",
                got=", ".join(unread),
            )

    def unread(self) -> list[str]:
        """Keys with a meaningful value that nothing asked for."""
        unread = [f"{self._prefix}{key}" for key, value in self._config.items() if value and key not in self._read]
        return sorted(unread + [key for section in self._sections.values() for key in section.unread()])
