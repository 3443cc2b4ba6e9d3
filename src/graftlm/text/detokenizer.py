"""Token ids to text, one at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

from graftlm.text.tokenizer import Tokenizer

# Enough of the prompt for tokenizers whose text depends on what stands before (a leading space, say).
_CONTEXT_TOKENS = 5


class IncrementalDetokenizer:
    """Text of a growing answer. The pieces joined are the text of all its ids after this prompt.

    A window of recent ids is decoded with and without the new ones and the difference is the new text, held back while
    it ends in U+FFFD: the bytes of an unfinished character. Ids without text (special ones, say) never enter it: after
    one alone, a tokenizer that strips leading spaces would lose a space inside the answer. Method as in
    text-generation-inference and vLLM.

    Args:
        skip_special_tokens: whether special ids have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._is_text = partial(tokenizer.is_text, skip_special_tokens=skip_special_tokens)
        with_text = filter(self._is_text, reversed(prompt_token_ids))
        self._ids = list(islice(with_text, _CONTEXT_TOKENS))[::-1]
        self._prefix_start = 0
        self._emitted_stop = len(self._ids)
        self._prefix_text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; often one word, sometimes empty."""
        if not self._is_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix_start :])
        if text.endswith("\ufffd"):
            return ""
        new_text = text[len(self._prefix_text) :]
        self._prefix_start = self._emitted_stop
        self._emitted_stop = len(self._ids)
        self._prefix_text = self._decode(self._ids[self._prefix_start :])
        return new_text

    def flush(self) -> str:
        """What is still held back when the answer ends in the middle of a character."""
        text = self._decode(self._ids[self._prefix_start :])
        return text[len(self._prefix_text) :]
