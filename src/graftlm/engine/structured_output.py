"""What an answer has to look like. Plain data with validation; no torch, and no grammar is compiled here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.errors import InvalidRequest

StructuredKind = Literal["json", "json_object", "regex", "choice", "grammar"]

# In characters. Compiling what is larger could take longer than a request is worth.
MAX_REGEX = 8 << 10
MAX_TEXT = 256 << 10
# Between two tokens of JSON: nothing, a space, or a new line with indentation. More would let a model that has lost its
# way write blanks until it runs out of tokens.
WHITESPACE_PATTERN = r"(\n {0,16}| )?"


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form of an answer: exactly one of the first five. Names as in vLLM's `StructuredOutputsParams`.

    The answer ends where its form does, with the finish reason "stop", whatever `min_tokens` and `ignore_eos` say.

    Args:
        json: a JSON schema, as an object or as text. Keywords that are not enforced are refused.
        json_object: any JSON object.
        regex: a regular expression that matches the whole answer, in the syntax of Rust's `regex`: no look-around, no
            back-references.
        choice: the answer is one of these.
        grammar: a Lark grammar in llguidance's dialect, or GBNF.
        whitespace_pattern: regular expression for what may stand between the tokens of JSON; empty for nothing.

    Raises:
        InvalidRequest: none or several are given, or one is of the wrong type, empty or too large; `param` is
            "structured".
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in ("json", "json_object", "regex", "choice", "grammar") if self._is_given(kind)]
        if len(given) != 1:
            raise InvalidRequest(
                "structured output needs exactly one form",
                param="structured",
                got=", ".join(given) or "none",
                allowed="json, json_object, regex, choice or grammar",
            )
        self._check_types()
        if self.whitespace_pattern is not None and not {"json", "json_object"}.intersection(given):
            raise _refusal("whitespace_pattern belongs to JSON", got=given[0])
        limit = MAX_REGEX if self.kind == "regex" else MAX_TEXT
        for text in (self.text, self.whitespace_pattern or ""):
            if len(text) > limit:
                raise _refusal(f"the {self.kind} is too large", f"{len(text)} characters", f"at most {limit}")

    def _is_given(self, kind: str) -> bool:
        value = getattr(self, kind)
        return value is not None and not (kind == "json_object" and value is False)

    def _check_types(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _refusal("json_object is neither true nor false", repr(self.json_object))
        if self.json is not None and not isinstance(self.json, Mapping | bool | str):
            raise _refusal("json is not a JSON schema", type(self.json).__name__, "an object or its text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _refusal(f"{name} is not text", repr(value)[:100])
            if value == "" and name != "whitespace_pattern":
                raise _refusal(f"{name} is empty")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            if not is_list or not self.choice or not all(isinstance(entry, str) and entry for entry in self.choice):
                raise _refusal("choice is not a list of texts", repr(self.choice)[:100], "one or more, none empty")
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> StructuredKind:
        kinds: tuple[StructuredKind, ...] = ("json", "json_object", "regex", "choice", "grammar")
        return next(kind for kind in kinds if self._is_given(kind))

    @property
    def text(self) -> str:
        """The schema, expression or grammar, or the choices as JSON."""
        if self.regex is not None or self.grammar is not None:
            return self.regex or self.grammar or ""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        if isinstance(self.json, str):
            return self.json
        schema = {"type": "object"} if self.json is None else self.json
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as cause:
            raise _refusal("json is not a JSON schema", str(cause)[:100]) from cause


def _refusal(what: str, got: object = None, allowed: str | None = None) -> InvalidRequest:
    return InvalidRequest(what, param="structured", got=got, allowed=allowed)
