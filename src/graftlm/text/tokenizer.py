"""A model's tokenizer and chat template, over transformers' AutoTokenizer."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from graftlm.errors import CheckpointError, InvalidRequest
from graftlm.text.gguf_tokenizer import read_gguf_tokenizer
from graftlm.text.tool_calls.description import tell_tools

# In characters, and tokens. Longer texts are read and written outside of the interpreter's lock, as only batches can
# be: 1000 characters take some 2 ms.
_LONG_TEXT = 2000
# A detokenizer asks for single ids again and again; what is kept of them takes 8 MB at most.
_NUM_REMEMBERED = 1 << 16
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class TextToken(NamedTuple):
    """A token and the characters [start, stop) of the text it stands for; none for one the tokenizer added."""

    token_id: int
    start: int
    stop: int


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to call from several threads: it sets no state on the tokenizer."""

    def __init__(self, hf_tokenizer: Any, chat_template: str | None = None) -> None:
        self._hf = hf_tokenizer
        self.chat_template: str | None = chat_template or hf_tokenizer.chat_template
        self._backend = hf_tokenizer.backend_tokenizer
        # A tokenizer.json saved while training may cut or pad every text it encodes.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._text_of = _remembered_texts(self._backend)
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        parameters = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        self._template_arguments = frozenset({*parameters, "self", "messages", "conversations"})

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    def to_json(self) -> str:
        """What a tokenizer.json of it holds: vocabulary, merges, added tokens."""
        text: str = self._backend.to_str()
        return text

    def with_chat_template(self, chat_template: str | None) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self._hf, chat_template)

    def save(self, folder: Path) -> None:
        """Write it as transformers does, chat template included."""
        self._hf.save_pretrained(folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` as the tokenizer's own post-processor does (a BOS, say).

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which no UTF-8 tokenizer can read.
        """
        encode = self._backend.encode if len(text) < _LONG_TEXT else self._encode_beside
        ids: list[int] = self._encode(encode, text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[TextToken]:
        """As `encode`, with where each token comes from.

        Raises:
            InvalidRequest: as `encode`.
        """
        encoding = self._encode(self._backend.encode, text, add_special_tokens=add_special_tokens)
        return [TextToken(token_id, *span) for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encode_beside(self, text: str, *, add_special_tokens: bool) -> Any:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _encode(self, encode: Callable[..., Any], text: str, *, add_special_tokens: bool) -> Any:
        try:
            return encode(text, add_special_tokens=add_special_tokens)
        except TypeError as cause:
            raise InvalidRequest("the text is not valid Unicode", param="prompt", got=repr(text)[:100]) from cause

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special token, which decoded text leaves out."""
        return token_id in self._special_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, special tokens left out unless they are wanted."""
        ids = list(token_ids)
        if len(ids) == 1:
            return self._text_of(ids[0], skip_special_tokens)
        if len(ids) < _LONG_TEXT:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def is_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether the id has a part in decoded text: it is in the vocabulary, and not special where those are left
        out."""
        left_out = skip_special_tokens and token_id in self._special_ids
        return not left_out and self._backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of an entry of the vocabulary, by its spelling there."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str:
        """The id's entry in the vocabulary, as the tokenizer spells it; empty for an id beyond it."""
        entry: str | None = self._backend.id_to_token(token_id)
        return entry or ""

    def token_text(self, token_id: int) -> str:
        """Text of one id alone, special tokens included; a part of a character shows as U+FFFD."""
        return self._text_of(token_id, False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """The prompt text for a conversation, by the model's own chat template (in Jinja's sandbox).

        A developer's message is a system message to a template that does not speak of developers.

        Args:
            add_generation_prompt: end with the header of the assistant's next turn.
            continue_final_message: end inside the last message, which the answer goes on with; needs
                add_generation_prompt to be off.
            tools: functions that may be called, as OpenAI describes them. A template that does not speak of tools is
                told of them in the system message.
            template_variables: what the template sees beside the conversation (`enable_thinking`, say).

        Raises:
            InvalidRequest: the model has no template, the template refuses these messages, or a variable has the name
                of something that is not the caller's to set.
        """
        if not self.chat_template:
            raise InvalidRequest(
                "this model has no chat template", param="messages", do="send a prompt to /v1/completions instead"
            )
        if taken := sorted(self._template_arguments.intersection(template_variables)):
            raise InvalidRequest(
                "chat_template_kwargs sets what is no variable of a template",
                param="chat_template_kwargs",
                got=", ".join(taken),
                do="leave it out",
            )
        has_developers = "developer" in self.chat_template
        try:
            if not re.search(r"\btools\b", self.chat_template):
                messages, tools = tell_tools(messages, tools or ()), None
            text: str = self._hf.apply_chat_template(
                [dict(message) if has_developers else _with_known_role(message) for message in messages],
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if not tools else [dict(tool) for tool in tools],
                **template_variables,
            )
        except Exception as cause:  # a template is foreign code: it can divide by zero, recurse without end, …
            raise InvalidRequest(
                "the chat template refuses these messages", param="messages", got=str(cause)[:200]
            ) from cause
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        check: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> list[int]:
        """Token ids for a conversation. The template writes its own special tokens, so none are added (one BOS, not
        two).

        Args:
            check: called with the text before it is tokenised.
            options: as for `render_chat`.

        Raises:
            InvalidRequest: as `render_chat`, and what `check` raises.
        """
        text = self.render_chat(messages, **options)
        check(text)
        try:
            return self.encode(text, add_special_tokens=False)
        except InvalidRequest as cause:
            raise InvalidRequest(cause.what, param="messages", got=cause.got) from cause


def _with_known_role(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else dict(message)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Half a million merges are as many lists, none of them garbage, each counted and visited by the collector: it is
    two fifths of the time that Gemma's tokenizer takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_tokenizer(source: Path | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model or adapter folder, or of a GGUF file's metadata. Code in a folder is never executed.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not isinstance(source, Path):
        return Tokenizer(read_gguf_tokenizer(source))
    try:
        with _no_garbage_collection():
            hf_tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as cause:  # the Rust parser raises plain Exception
        raise CheckpointError("the tokenizer cannot be read", got=f"{source.name}: {str(cause)[:200]}") from cause
    if getattr(hf_tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError("the tokenizer has no fast (tokenizer.json) form", got=type(hf_tokenizer).__name__)
    return Tokenizer(hf_tokenizer)


def _remembered_texts(backend: Any) -> Callable[[int, bool], str]:
    """(id, whether special tokens have no text) -> the text of the id alone."""

    @lru_cache(_NUM_REMEMBERED)
    def text_of(token_id: int, skip_special_tokens: bool) -> str:
        text: str = backend.decode([token_id], skip_special_tokens=skip_special_tokens)
        return text

    return text_of
