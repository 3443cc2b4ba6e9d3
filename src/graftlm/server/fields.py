"""What every field of a request is made of: strictness, text, and values that are not offered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, PlainValidator
from pydantic_core import PydanticCustomError

from graftlm.server.prompts import is_sendable

Item = TypeVar("Item")
# One item that is wrong is told of: a million would take half a minute, and nobody else is served meanwhile.
Items = Annotated[list[Item], Field(fail_fast=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _check_unicode(text: str) -> str:
    if not is_sendable(text):
        raise PydanticCustomError("surrogate", "text without unpaired surrogates")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


def _check_json(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if not is_sendable(json.dumps(value, ensure_ascii=False)):
        raise PydanticCustomError("surrogate", "JSON without unpaired surrogates")
    return value


# Finite numbers, and no deeper than pydantic follows: what can be written again, in a prompt or a reply.
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_check_json)]


# Told apart by identity: 1 equals True, and `Annotated` gives one type for equal arguments.
@dataclass(frozen=True, eq=False)
class NothingBut:
    """What is not offered: the field may only hold values which ask for nothing."""

    harmless: tuple[object, ...]

    def __call__(self, value: object) -> object:
        if any(value == allowed and type(value) is type(allowed) for allowed in self.harmless):
            return value
        shown = ", ".join("null" if allowed is None else str(allowed) for allowed in self.harmless)
        raise PydanticCustomError("unsupported", "allowed: {shown}; do: leave it out", {"shown": shown})


def nothing_but(*harmless: object) -> PlainValidator:
    return PlainValidator(NothingBut(harmless))


def harmless_values(body: type[BaseModel], name: str) -> tuple[object, ...] | None:
    """The values of a field that are accepted because they ask for nothing; None if the field is honoured."""
    checks = (getattr(entry, "func", None) for entry in body.model_fields[name].metadata)
    return next((check.harmless for check in checks if isinstance(check, NothingBut)), None)
