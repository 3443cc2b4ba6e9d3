"""The four shapes of a completion's `prompt`: text, texts, token ids, lists of token ids."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

Prompt = str | list[int]

# Each prompt is a request to the engine; more at once than this is a batch job, not a request.
MAX_ANSWERS = 1024


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """One entry per prompt.

    Raises:
        PydanticCustomError: it has none of the four shapes; the message says where it leaves them.
    """
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list):
        raise _refusal("a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise _refusal("at least one prompt, not an empty list")
    first = value[0]
    if isinstance(first, str | list):
        if len(value) > MAX_ANSWERS:
            raise _refusal(f"at most {MAX_ANSWERS} prompts in one request, not {len(value)}")
        read = _text if isinstance(first, str) else _token_ids
        return tuple(read(entry, f"prompt[{index}]") for index, entry in enumerate(value))
    return (_token_ids(value, "prompt"),)


def is_sendable(text: str) -> bool:
    """False for half a surrogate pair, which JSON can hold and no tokenizer or reply can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(entry: object, where: str) -> str:
    if not isinstance(entry, str):
        raise _refusal(f"{where} must be a string like the prompts before it")
    if not is_sendable(entry):
        raise _refusal(f"{where} must not hold unpaired surrogates")
    return entry


def _token_ids(entry: object, where: str) -> list[int]:
    if not isinstance(entry, list):
        raise _refusal(f"{where} must be a list of token ids like the prompts before it")
    if not entry:
        raise _refusal(f"{where} must hold at least one token id")
    if {*map(type, entry)} != {int}:
        index, token_id = next((index, token_id) for index, token_id in enumerate(entry) if type(token_id) is not int)
        raise _refusal(f"{where}[{index}] must be a whole number, not {token_id!r:.80}")
    return entry


def _refusal(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("prompt_shape", "{allowed}", {"allowed": allowed})
