"""The vocabulary in a GGUF file's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from graftlm.errors import CheckpointError

T = TypeVar("T")


class TokenType(IntEnum):
    """What llama.cpp says a token is; the numbers are the file's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary:
    """What a GGUF file says about its tokenizer.

    Args:
        model: how text becomes tokens: "gpt2" (byte-level merges), "llama" (SentencePiece), ...
        split: tokenizer.ggml.pre; None in old files.
        architecture: general.architecture.
        tokens: by id.
        types: of each token.
        scores: of each token; empty where the file has none.
        merges: pairs, the first wins; None where they follow from the scores.
        special: "bos", "eos", "unk", "pad" -> id.
        adds_bos, adds_eos, adds_space: None where the file does not say. The last is of a space before a text.
    """

    model: str
    split: str | None
    architecture: str
    tokens: Sequence[str]
    types: Sequence[TokenType]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]] | None
    special: Mapping[str, int]
    adds_bos: bool | None
    adds_eos: bool | None
    adds_space: bool | None
    chat_template: str | None

    def of_type(self, *types: TokenType) -> list[str]:
        """Tokens, in the order of their ids."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """
    Args:
        metadata: of the file, by llama.cpp's keys.

    Raises:
        CheckpointError: there is no vocabulary, or its parts do not fit each other.
    """
    reader = _Reader(metadata)
    tokens = [_text(token) for token in reader.array("tokens", str)]
    if not tokens:
        raise CheckpointError("the GGUF file has no tokenizer", got="no tokenizer.ggml.tokens")
    types = [_type(number) for number in reader.array("token_type", int, length=len(tokens))]
    return GGUFVocabulary(
        model=reader.value("tokenizer.ggml.model", str) or "",
        split=reader.value("tokenizer.ggml.pre", str),
        architecture=reader.value("general.architecture", str) or "",
        tokens=tokens,
        types=types or [TokenType.NORMAL] * len(tokens),
        scores=reader.array("scores", float, length=len(tokens)),
        merges=_merges(reader.array("merges", str)),
        special=reader.special(len(tokens)),
        adds_bos=reader.value("tokenizer.ggml.add_bos_token", bool),
        adds_eos=reader.value("tokenizer.ggml.add_eos_token", bool),
        adds_space=reader.value("tokenizer.ggml.add_space_prefix", bool),
        chat_template=reader.value("tokenizer.chat_template", str),
    )


class _Reader:
    """Values of the metadata, of the types they should have."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def value(self, key: str, kind: type[T]) -> T | None:
        value = self._metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise CheckpointError(f"{key} in the GGUF file is no {kind.__name__}", got=repr(value)[:100])

    def array(self, name: str, kind: type[T], *, length: int | None = None) -> list[T]:
        """A list; empty where the file has none."""
        key = f"tokenizer.ggml.{name}"
        values = self.value(key, list) or []
        strange = next((value for value in values if not isinstance(value, kind)), None)
        if strange is not None:
            raise CheckpointError(f"{key} in the GGUF file is not made of {kind.__name__}", got=repr(strange)[:100])
        if values and length is not None and len(values) != length:
            raise CheckpointError(
                f"{key} in the GGUF file does not fit its tokens", got=len(values), allowed=str(length)
            )
        return values

    def special(self, num_tokens: int) -> dict[str, int]:
        found = {}
        for name, stem in SPECIAL_KEYS.items():
            key = f"tokenizer.ggml.{stem}_token_id"
            token_id = self.value(key, int)
            if token_id is None:
                continue
            if not 0 <= token_id < num_tokens:
                raise CheckpointError(
                    f"{key} in the GGUF file is no token's id", got=token_id, allowed=f"0 to {num_tokens - 1}"
                )
            found[name] = token_id
        return found


def _type(number: int) -> TokenType:
    try:
        return TokenType(number)
    except ValueError as cause:
        raise CheckpointError(
            "tokenizer.ggml.token_type in the GGUF file has an unknown type", got=number, allowed="1 to 6"
        ) from cause


def _merges(lines: Sequence[str]) -> list[tuple[str, str]] | None:
    """A space parts the two; tokens of spaces, which some files have, begin or end with one."""
    pairs = []
    for line in lines:
        left, _, right = _text(line[1:]).partition(" ")
        pairs.append((line[:1] + left, right))
    broken = next((line for line, (left, right) in zip(lines, pairs, strict=True) if not left or not right), None)
    if broken is not None:
        raise CheckpointError("tokenizer.ggml.merges in the GGUF file holds what is no pair", got=repr(broken)[:100])
    return pairs or None


def _text(token: str) -> str:
    """Bytes that are no UTF-8 alone, which the file's reader keeps as surrogates, cannot be met in any text."""
    return token.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
